"""Questions about paragraphs: SQuAD and HotpotQA, alone or among distractors (RULER's qa_1 and qa_2)."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

from kvpass.benchmarks.tasks.lengths import fill
from kvpass.benchmarks.tasks.longbench import pick, whole
from kvpass.benchmarks.tasks.rows import data_file, rows, text
from kvpass.benchmarks.tasks.sample import Sample

_SQUAD, _HOTPOT = "squad_xquad_en.json", "hotpotqa_distractor_100.jsonl"
_ORDER = "Only give me the answer and do not output any other words."
_ASK = f"\n\nAnswer the question based on the given documents. {_ORDER}\n\nQuestion: "
_PREFIX = f"Answer the question based on the given documents. {_ORDER}\n\nThe following are given documents.\n\n"


@dataclass(frozen=True)
class Question:
    """A question, its answers, the paragraphs that hold them, and the paragraphs nearest to those."""

    id: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]
    near: tuple[str, ...]


def squad_among(tokenizer, length: int, count: int, seed: int, data: Path | None) -> list[Sample]:
    """``qa_1``: SQuAD questions, their paragraph among others of its article first, then any, up to ``length``."""
    return _among("qa_1", _squad(data_file("qa_1", data, _SQUAD)), tokenizer, length, count, seed)


def hotpot_among(tokenizer, length: int, count: int, seed: int, data: Path | None) -> list[Sample]:
    """``qa_2``: HotpotQA questions, their two paragraphs among their own distractors first, then any."""
    return _among("qa_2", _hotpot(data_file("qa_2", data, _HOTPOT)), tokenizer, length, count, seed)


def hotpotqa(tokenizer, length: int, count: int, seed: int, data: Path | None) -> list[Sample]:
    """HotpotQA questions with their own ten paragraphs, where these fit."""
    questions = _hotpot(data_file("hotpotqa", data, _HOTPOT))
    random.Random(f"hotpotqa {seed}").shuffle(questions)
    found = [_laid_out("hotpotqa", question, "f1", 24, (*question.gold, *question.near)) for question in questions]
    return pick("hotpotqa", found, whole, tokenizer, length, count)


def _among(name: str, questions: list[Question], tokenizer, length: int, count: int, seed: int) -> list[Sample]:
    everything = list(dict.fromkeys(part for question in questions for part in (*question.gold, *question.near)))
    random.Random(f"{name} {seed}").shuffle(questions)
    samples: list[Sample] = []
    for question in questions:
        if len(samples) == count:
            break
        # Sentence by sentence, so that any length can be filled; only the last distractor may be a part of one.
        others = random.Random(f"{name} {seed} {question.id}").sample(everything, len(everything))
        distractors = [part for part in dict.fromkeys((*question.near, *others)) if part not in question.gold]
        pieces = [(index, piece) for index, part in enumerate(distractors) for piece in _sentences(part)]

        def make(size: int, question=question, pieces=pieces) -> Sample:
            documents: dict[int, str] = {}
            for index, piece in pieces[: size - 1]:
                documents[index] = documents.get(index, "") + piece
            added = tuple(part.strip() for part in documents.values())
            return _laid_out(name, question, "match_any", 32, (*question.gold, *added))

        if (sample := fill(make, length, tokenizer, most=len(pieces) + 1)) is not None:
            samples.append(sample)
    if not samples:
        raise ValueError(f"{name}: no question and its paragraph fit {length} tokens")
    return samples


def _laid_out(name: str, question: Question, metric: str, new_tokens: int, documents: tuple[str, ...]) -> Sample:
    """Documents in an order that depends on each alone, so that adding one does not move the others."""
    shuffled = sorted(documents, key=lambda part: random.Random(f"{question.id} {part[:80]}").random())
    return Sample(
        task=name,
        id=question.id,
        family="qa",
        prefix=_PREFIX,
        context="\n\n".join(f"Document {number}:\n{part}" for number, part in enumerate(shuffled, 1)),
        suffix=f"{_ASK}{question.question}\nAnswer:",
        answers=question.answers,
        chat=True,
        metric=metric,
        new_tokens=new_tokens,
    )


def _sentences(part: str) -> list[str]:
    return re.split(r"(?<=[.!?] )", part)


def _squad(path: Path) -> list[Question]:
    try:
        articles = [article["paragraphs"] for article in json.loads(path.read_text(encoding="utf-8"))["data"]]
        return [
            Question(
                id=asked["id"],
                question=asked["question"],
                answers=tuple(dict.fromkeys(answer["text"] for answer in asked["answers"])),
                gold=(paragraph["context"],),
                near=tuple(other["context"] for other in paragraphs if other is not paragraph),
            )
            for paragraphs in articles
            for paragraph in paragraphs
            for asked in paragraph["qas"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name}: is not in SQuAD's format ({error!r})") from None


def _hotpot(path: Path) -> list[Question]:
    found = []
    for where, row in rows(path):
        try:
            titles, parts = row["context"]["title"], row["context"]["sentences"]
            told = set(row["supporting_facts"]["title"])
            documents = [(title, f"{title}\n" + "".join(part)) for title, part in zip(titles, parts, strict=True)]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: is not in HotpotQA's format ({error!r})") from None
        found.append(
            Question(
                id=text(row, "id", where),
                question=text(row, "question", where),
                answers=(text(row, "answer", where),),
                gold=tuple(document for title, document in documents if title in told),
                near=tuple(document for title, document in documents if title not in told),
            )
        )
    return found
