"""Language modelling: windows of running text, and how they go on."""

from __future__ import annotations

import random
import re
from pathlib import Path

from kvpass.benchmarks.tasks.lengths import words_within
from kvpass.benchmarks.tasks.sample import Sample
from kvpass.benchmarks.text import reference

CONTINUATION = 256  # tokens to be predicted after each window
_CHARS_A_TOKEN = 6  # of ordinary text in the worst of these sources, to place windows before tokenising them


def language(tokenizer, length: int, count: int, seed: int, data: Path | None) -> list[Sample]:
    """``count`` windows of ``length`` tokens, in turn from each file of ``data/text``; else Python's reference."""
    files = sorted((data / "text").glob("*.txt")) if data else []
    texts = {path.stem: path.read_text(encoding="utf-8", errors="replace") for path in files}
    return _windows("language", texts or {"pydoc": reference()}, tokenizer, length, count, seed)


def pydoc(tokenizer, length: int, count: int, seed: int, data: Path | None) -> list[Sample]:
    """``count`` windows of ``length`` tokens of Python's language reference, which needs no data."""
    return _windows("pydoc", {"pydoc": reference()}, tokenizer, length, count, seed)


def _windows(task: str, texts: dict[str, str], tokenizer, length: int, count: int, seed: int) -> list[Sample]:
    names = list(texts)
    samples = []
    for index in range(count):
        name = names[index % len(names)]
        turn, turns = index // len(names), -(-(count - index % len(names)) // len(names))
        samples.append(_window(task, name, texts[name], tokenizer, length, (turn, turns), seed))
    return samples


def _window(task: str, name: str, text: str, tokenizer, length: int, slot: tuple[int, int], seed: int) -> Sample:
    """One window whose first word lies in the ``slot[0]``-th of ``slot[1]`` equal parts of ``text``."""
    room = len(text) - (length + CONTINUATION) * _CHARS_A_TOKEN
    if room < slot[1]:
        raise ValueError(f"{name}: is too short for {slot[1]} windows of {length} + {CONTINUATION} tokens")
    draw = random.Random(f"{name} {seed} {slot[0]}")
    start = int(room * (slot[0] + draw.random()) / slot[1])
    start = re.compile(r"\s+").search(text, start).end()
    cut = start + words_within(text[start:], length, tokenizer)
    end = cut + words_within(text[cut:], CONTINUATION, tokenizer)
    return Sample(
        task=task,
        id=f"{name}-{start}",
        family="language",
        prefix="",
        context=text[start:cut],
        suffix="",
        answers=(text[cut:end],),
    )
