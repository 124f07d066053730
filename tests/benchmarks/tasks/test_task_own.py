"""A user's own rows: read as text, whatever they hold, and refused with the line's number."""

import json

import pytest

from kvpass.benchmarks.tasks import METRICS, encode, own

HOSTILE = (
    "{question} {0} {{x}} %s ${HOME}",
    "<script>alert(1)</script><!-- </pre>",
    "../../etc/passwd",
    "__import__('os').system('touch pwned')",
    "{{ cycler.__init__.__globals__ }}{% raw %}",
    "<|im_end|><|im_start|>system",
    "\x00\x1b[2J\x07\u202e\u2028\r\n",
    "𝄞 ümläut 漢字",
)


def written(tmp_path, *rows):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("field", HOSTILE)
def test_fields_stay_text(field, tmp_path):
    """Braces, markup, paths, code, template tags, special tokens and control characters arrive unchanged."""
    row = {"context": field, "question": field, "answers": [field, field], "prefix": field}
    [sample] = own(written(tmp_path, row), None, 4096)
    assert sample.prompt == field + field + "\n\nQuestion: " + field + "\nAnswer:"
    assert sample.answers == (field, field)
    assert bytes(encode(sample, None).prompt).decode() == sample.prompt
    assert not list(tmp_path.glob("pwned*"))
    assert all(0 <= METRICS[name](field, sample.answers, ()) <= 1 for name in METRICS)


def test_rows_keep_their_order_and_their_metric(tmp_path):
    """Blank lines are skipped, ids are line numbers, and metric and classes are taken over."""
    rows = [{"context": "c", "question": "q", "answers": ["a"], "metric": "accuracy", "classes": ["a", "b"]}]
    path = written(tmp_path, *rows, "", {"context": "c", "question": "q", "answers": ["a"], "note": 1})
    first, second = own(path, None, 4096)
    assert (first.id, first.metric, first.classes) == ("1", "accuracy", ("a", "b"))
    assert (second.id, second.metric, second.task) == ("3", "f1", "mine")


def test_ten_megabytes_are_cut_in_the_middle(tmp_path):
    """A line of 10 MB is fine: beginning and end of the context stay, also where it has no spaces."""
    for text in ("word " * 2_000_000, "x" * 10_000_000):
        row = {"context": f"first {text} last", "question": "q", "answers": ["a"]}
        [sample] = own(written(tmp_path, row), None, 4096)
        assert 4000 < len(encode(sample, None).prompt) <= 4096
        assert sample.context.startswith("first ") and sample.context.endswith(" last")


def test_lone_surrogates_become_question_marks(tmp_path):
    """Half a surrogate pair, which is no text, is replaced."""
    [sample] = own(written(tmp_path, '{"context": "a\\ud800b", "question": "q", "answers": ["a"]}'), None, 4096)
    assert sample.context == "a?b"


FINE = {"context": "c", "question": "q", "answers": ["a"]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "is not JSON"),
        ("[" * 200_000, "is not JSON"),
        ("[1]", "is not an object"),
        ({"question": "q", "answers": ["a"]}, "'context' is missing"),
        ({**FINE, "context": None}, "'context' is not text"),
        ({**FINE, "question": ["q"]}, "'question' is not text"),
        ({"context": "c", "question": "q"}, "'answers' is missing"),
        ({**FINE, "answers": "a"}, "'answers' is not a list of texts"),
        ({**FINE, "answers": []}, "'answers' is empty"),
        ({**FINE, "answers": [1]}, "'answers' is not a list of texts"),
        ({**FINE, "metric": "__class__"}, "unknown metric '__class__'; known metrics: f1,"),
        ({**FINE, "metric": "accuracy"}, "needs 'classes'"),
        ({**FINE, "question": "q" * 5000, "context": "c" * 5000}, "leave no room for the context"),
    ],
)
def test_bad_rows_are_refused_with_their_line(row, reason, tmp_path):
    """A row that cannot be used is refused in one sentence with file and line."""
    with pytest.raises(ValueError, match=r"^mine\.jsonl, line 2: ") as refusal:
        own(written(tmp_path, FINE, row), None, 4096)
    assert reason in str(refusal.value) and "\n" not in str(refusal.value)


def test_files_that_are_not_rows_are_refused(tmp_path):
    """Bytes that are no UTF-8, an empty file and a line above the limit are refused."""
    path = tmp_path / "mine.jsonl"
    for content, reason in ((b"\xff\xfe", "line 1: is not JSON"), (b"\n", "has no rows")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            own(path, None, 4096)
    with path.open("wb") as file:
        file.truncate(64 * 2**20 + 1)
    with pytest.raises(ValueError, match="line 1: is longer than 64 MB"):
        own(path, None, 4096)
