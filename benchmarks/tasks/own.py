"""Bring your own questions: JSON lines of ``{"context", "question", "answers"}``."""

from __future__ import annotations

from pathlib import Path

from kvpass.benchmarks.tasks.lengths import cut_middle
from kvpass.benchmarks.tasks.metrics import METRICS
from kvpass.benchmarks.tasks.rows import rows, text, texts
from kvpass.benchmarks.tasks.sample import Sample

NEW_TOKENS = 32


def own(path: Path, tokenizer, length: int) -> list[Sample]:
    """Every row of ``path``, in order, with the middle of contexts left out that do not fit ``length`` tokens.

    Fields are text whatever they hold: ``context``, ``question`` and ``answers`` (a list); optional are ``prefix``
    (instructions before the context), ``metric`` (a name in ``METRICS``, ``"f1"`` when left out) and ``classes`` (a
    list, for ``"accuracy"``). Other fields are not read. A line has at most 64 MB.

    Raises:
        ValueError: a row is not JSON, lacks a field or has another type there, or its question alone is too long;
            the sentence has the line's number.
    """
    samples = []
    for where, row in rows(path):
        metric = text(row, "metric", where, "f1")
        if metric not in METRICS:
            raise ValueError(f"{where}: unknown metric {metric!r}; known metrics: {', '.join(METRICS)}")
        answers = texts(row, "answers", where)
        if not any(answers):
            raise ValueError(f"{where}: 'answers' is empty")
        classes = texts(row, "classes", where, ())
        if metric == "accuracy" and answers[0] not in classes:
            raise ValueError(f"{where}: metric 'accuracy' needs 'classes' with the first answer among them")
        sample = Sample(
            task=path.stem,
            id=where.rpartition(" ")[2],
            family="qa",
            prefix=text(row, "prefix", where, ""),
            context=text(row, "context", where),
            suffix="\n\nQuestion: " + text(row, "question", where) + "\nAnswer:",
            answers=answers,
            classes=classes,
            chat=True,
            metric=metric,
            new_tokens=NEW_TOKENS,
        )
        if (cut := cut_middle(sample, length, tokenizer)) is None:
            raise ValueError(f"{where}: prefix and question leave no room for the context in {length} tokens")
        samples.append(cut)
    if not samples:
        raise ValueError(f"{path.name}: has no rows")
    return samples
