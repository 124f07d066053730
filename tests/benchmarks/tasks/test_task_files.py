"""Tasks read from files, on small ones in each format."""

import json

import pytest

from kvpass.benchmarks.tasks import TASKS, encode
from kvpass.benchmarks.tasks.longbench import LONGBENCH

NEED_DATA = {"qa_1", "qa_2", "hotpotqa", "qmsum", "babilong_qa1", "babilong_qa2", *LONGBENCH}


def write(path, *rows):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", sorted(NEED_DATA))
def test_without_data_refused(name, tmp_path):
    """A task whose file is missing says which one it needs."""
    for data in (None, tmp_path):
        with pytest.raises(ValueError, match=rf"^{name}: needs .*\.jsonl?.* in the folder of data"):
            TASKS[name](None, 2048, 1, 0, data)


@pytest.mark.parametrize("name", LONGBENCH)
def test_longbench_rows_and_complete_prompts_agree(name, tmp_path):
    """LongBench's own row and the complete prompt give the same three parts, and together the prompt."""
    layout = LONGBENCH[name]
    shots = "".join(f"{layout.shot}text {index}\n" for index in range(3)) if layout.shot else "A text.\n"
    asked = layout.mark.lstrip("\n") + "what?" if layout.family == "few-shot" else "what?" * bool(layout.tail)
    prompt = layout.head + shots + layout.tail + asked + layout.end
    path = tmp_path / (layout.files or (f"longbench/{name}.jsonl",))[0]
    found = []
    for row in ({"context": shots, "input": asked}, {"prompt": prompt}):
        write(path, {"id": "x", "answers": ["yes"], "all_classes": None, **row})
        found += TASKS[name](None, 4096, 1, 0, tmp_path)
    assert found[0] == found[1]
    assert found[0].prompt == prompt and found[0].prefix == layout.head
    assert found[0].suffix.startswith(layout.mark) and "what?" not in found[0].context
    assert found[0].metric == layout.metric and found[0].answers == ("yes",)


def test_rows_that_do_not_fit_are_left_out(tmp_path):
    """A text is never cut where an answer could be lost: longer rows are left out, and none left is an error."""
    path = tmp_path / "longbench" / "qasper.jsonl"
    write(path, *({"_id": size, "context": "word " * size, "input": "?", "answers": ["a"]} for size in (10, 100, 9999)))
    assert {sample.id for sample in TASKS["qasper"](None, 1200, 5, 0, tmp_path)} == {"10", "100"}
    assert [sample.id for sample in TASKS["qasper"](None, 1200, 1, 0, tmp_path)] == ["100"]  # of more than half
    with pytest.raises(ValueError, match="qasper: none of 3 rows fits 100 tokens"):
        TASKS["qasper"](None, 100, 1, 0, tmp_path)


def test_the_middle_is_cut(tmp_path):
    """Long multi-document contexts keep their beginning and their end, cut at spaces, and fill the length."""
    context = " ".join(f"w{index}" for index in range(5000))
    write(tmp_path / "longbench" / "musique.jsonl", {"context": context, "input": "?", "answers": ["a"]})
    sample = TASKS["musique"](None, 2000, 1, 0, tmp_path)[0]
    assert 1980 < len(encode(sample, None).prompt) <= 2000
    words = sample.context.split(" ")
    seam = next(place for place, word in enumerate(words) if word != f"w{place}")
    assert words == [*(f"w{index}" for index in range(seam)), *context.split(" ")[seam - len(words) :]]
    assert abs(len(" ".join(words[:seam])) - len(" ".join(words[seam:]))) < 20


def test_whole_shots_are_dropped_from_the_front(tmp_path):
    """Few-shot prompts lose their first examples, whole ones; the last question stays."""
    shots = "".join(f"Question: number {index} ?\nType: Other\n" for index in range(100))
    row = {"context": shots, "input": "Question: which ?\nType:", "answers": ["Date"], "all_classes": ["Date", "Other"]}
    write(tmp_path / "longbench" / "trec.jsonl", row)
    sample = TASKS["trec"](None, 1000, 1, 0, tmp_path)[0]
    assert shots.endswith(sample.context) and sample.context.startswith("Question: number ")
    assert 950 < len(encode(sample, None).prompt) <= 1000
    assert sample.suffix == "\nQuestion: which ?\nType:" and sample.classes == ("Date", "Other")


def test_gold_of_a_long_answer_is_its_beginning(tmp_path):
    """The likelihood of a summary is measured on its first 160 tokens; the metric sees all of it."""
    write(tmp_path / "longbench" / "gov_report.jsonl", {"context": "text", "input": "", "answers": ["word " * 99]})
    sample = TASKS["gov_report"](None, 2000, 1, 0, tmp_path)[0]
    assert sample.answers == ("word " * 99,)
    assert sample.gold == ("word " * 32)[:-1]


def test_gold_is_an_answer_that_the_text_spells_out(tmp_path):
    """Of several spellings the likelihood is measured on one that the context has."""
    row = {"context": "It was Q.E.D.", "input": "?", "answers": ["qed", "Q.E.D."]}
    write(tmp_path / "longbench" / "qasper.jsonl", row)
    assert TASKS["qasper"](None, 2000, 1, 0, tmp_path)[0].gold == "Q.E.D."


@pytest.fixture
def paragraphs(tmp_path):
    """Four paragraphs in two articles, in SQuAD's format, and the same as one HotpotQA question."""
    text = {name: f"{name} begins. " + f"It goes on about {name}. " * 5 for name in ("ant", "bee", "cow", "dog")}

    def paragraph(name):
        answers = [{"text": name}, {"text": name}]
        return {"context": text[name], "qas": [{"id": name, "question": f"which {name}?", "answers": answers}]}

    articles = [
        {"paragraphs": [paragraph("ant"), paragraph("bee")]},
        {"paragraphs": [paragraph("cow"), paragraph("dog")]},
    ]
    (tmp_path / "squad_xquad_en.json").write_text(json.dumps({"data": articles}))
    hotpot = {
        "id": "h",
        "question": "which two?",
        "answer": "ant",
        "context": {"title": list(text), "sentences": [value.split("(?<= )") for value in text.values()]},
        "supporting_facts": {"title": ["ant", "dog"], "sent_id": [0, 0]},
    }
    write(tmp_path / "hotpotqa_distractor_100.jsonl", hotpot)
    return tmp_path


def test_distractors_of_the_same_article_come_first(paragraphs):
    """The paragraph with the answer is whole, then others of its article, then any, until the length is filled."""
    for sample in TASKS["qa_1"](None, 800, 4, 0, paragraphs):
        [answer] = sample.answers
        neighbour = {"ant": "bee", "bee": "ant", "cow": "dog", "dog": "cow"}[answer]
        assert sample.context.count(f"goes on about {answer}") == 5
        assert sample.context.count(f"goes on about {neighbour}") == 5
        assert 750 < len(encode(sample, None).prompt) <= 800
        assert sample.suffix.endswith(f"Question: which {answer}?\nAnswer:") and sample.chat
    everything = TASKS["qa_1"](None, 8000, 1, 0, paragraphs)[0].context
    assert everything.count("begins.") == everything.count("Document ") == 4


def test_both_supporting_paragraphs_are_there(paragraphs):
    """HotpotQA's two supporting paragraphs are whole, among distractors and with their own."""
    for name in ("qa_2", "hotpotqa"):
        [sample] = TASKS[name](None, 1200, 5, 0, paragraphs)
        assert all(sample.context.count(f"goes on about {title}") == 5 for title in ("ant", "dog"))
        assert sample.answers == ("ant",)


def test_turns_around_the_relevant_ones(tmp_path):
    """A meeting is given as the turns the query is about, with as many on both sides as fit."""
    turns = [{"speaker": f"S{index}", "content": f"turn {index:04}."} for index in range(400)]
    query = {"query": "why?", "answer": "so", "relevant_text_span": [["200", "201"], ["203", "203"]]}
    write(tmp_path / "qmsum_test.jsonl", {"meeting_transcripts": turns, "specific_query_list": [query]})
    [sample] = TASKS["qmsum"](None, 1500, 5, 0, tmp_path)
    found = [int(line.rpartition(" ")[2].rstrip(".")) for line in sample.context.split("\n")]
    assert found == list(range(found[0], found[-1] + 1))
    assert abs((200 - found[0]) - (found[-1] - 203)) <= 1 and {200, 201, 202, 203} <= set(found)
    assert 1450 < len(encode(sample, None).prompt) <= 1500


def test_babilong_takes_the_longest_that_fit(tmp_path):
    """Samples come from the largest size that fits before smaller ones."""
    for size in (0, 1, 2):
        row = {"input": "x" * 700 * size + "John is here.", "question": "Where is John? ", "target": "here"}
        write(tmp_path / "babilong" / f"qa1_{size}k.jsonl", row)
    ids = [sample.id for sample in TASKS["babilong_qa1"](None, 2500, 2, 0, tmp_path)]
    assert ids == ["qa1_2k-1", "qa1_1k-1"]
    assert TASKS["babilong_qa1"](None, 1200, 2, 0, tmp_path)[0].suffix == "\n\nQuestion: Where is John?\nAnswer:"
