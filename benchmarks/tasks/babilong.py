"""BABILong (arXiv 2406.10149): a few facts scattered over the text of books, and a question about them."""

from __future__ import annotations

import random
from pathlib import Path

from kvpass.benchmarks.tasks.longbench import pick, whole
from kvpass.benchmarks.tasks.rows import rows, text
from kvpass.benchmarks.tasks.sample import Sample

_PREFIX = (
    "Facts about where persons and things are have been hidden in the text below. Answer the question at the end from "
    "these facts alone. If a person or thing has moved, the last place counts. Answer with one word, the place.\n\n"
)


def babilong(name: str, tokenizer, length: int, count: int, seed: int, data: Path | None) -> list[Sample]:
    """At most ``count`` samples that fit ``length``, those from the longest books first; ``babilong/qa1_2k.jsonl``."""
    kind = name.rpartition("_")[2]
    files = sorted((data / "babilong").glob(f"{kind}_*k.jsonl"), key=_size, reverse=True) if data else []
    if not files:
        raise ValueError(
            f"{name}: needs babilong/{kind}_1k.jsonl or another size in the folder of data, and there is none"
        )
    found = []
    for path in files:
        if _size(path) * 1000 > length:
            continue
        samples = [_sample(name, path.stem, where, row) for where, row in rows(path)]
        random.Random(f"{name} {path.stem} {seed}").shuffle(samples)
        found += samples
    return pick(name, found, whole, tokenizer, length, count)


def _size(path: Path) -> int:
    digits = path.stem.rpartition("_")[2].removesuffix("k")
    return int(digits) if digits.isdigit() else 0


def _sample(name: str, stem: str, where: str, row: dict) -> Sample:
    return Sample(
        task=name,
        id=f"{stem}-{where.rpartition(' ')[2]}",
        family="reasoning",
        prefix=_PREFIX,
        context=text(row, "input", where),
        suffix=f"\n\nQuestion: {text(row, 'question', where).strip()}\nAnswer:",
        answers=(text(row, "target", where),),
        chat=True,
        metric="match_any",
        new_tokens=8,
    )
