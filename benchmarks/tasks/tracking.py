"""Variable tracking: one value passed along a chain of variables (RULER, arXiv 2404.06654, section 3.2)."""

from __future__ import annotations

import random
import string
from itertools import pairwise
from pathlib import Path

from kvpass.benchmarks.tasks.lengths import fill
from kvpass.benchmarks.tasks.sample import Sample
from kvpass.benchmarks.tasks.vocabulary import NOISE, letters

_HOPS = 4
_EXAMPLE_LINES = 5


def variable_tracking(tokenizer, length: int, count: int, seed: int, data: Path | None) -> list[Sample]:
    """``count`` chains of five variables in the noise, after one solved example; all five names are the answer."""
    samples = []
    for index in range(count):
        key = f"vt {seed} {index}"
        sample = fill(lambda size, key=key: _sample(key, size), length, tokenizer)
        if sample is None:
            raise ValueError(f"vt: {length} tokens do not hold the example and the chain")
        samples.append(sample)
    return samples


def _sample(key: str, size: int) -> Sample:
    draw = random.Random(key)
    example = _chain(draw, _EXAMPLE_LINES, name_length=3)
    names, value, context = _chain(draw, size, name_length=5)
    return Sample(
        task="vt",
        id=key.replace(" ", "-"),
        family="reasoning",
        prefix=f"{_HEAD}{example[2]}{_question(example[1])} {' '.join(example[0])}\n\n{_HEAD}",
        context=context,
        suffix=_question(value),
        answers=tuple(names),
        metric="match_all",
        new_tokens=30,
        gold=" ".join(names),
    )


def _chain(draw: random.Random, size: int, name_length: int) -> tuple[list[str], str, str]:
    """Names, their value, and ``size`` lines of noise with the assignments in order at random places."""
    names: list[str] = []
    while len(names) <= _HOPS:
        name = letters(draw, name_length, string.ascii_uppercase)
        names += [name] * (name not in names)
    value = str(draw.randrange(10**4, 10**5))
    steps = [f"VAR {names[0]} = {value}"]
    steps += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
    places = sorted(draw.random() for _ in steps)
    lines = [NOISE] * size
    for step, place in reversed(list(zip(steps, places, strict=True))):
        lines.insert(int(place * (size + 1)), step)
    return names, value, "\n".join(lines)


_HEAD = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"


def _question(value: str) -> str:
    return (
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above. "
        "Answer: According to the chain(s) of variable assignment in the text above, "
        f"{_HOPS + 1} variables are assgined the value {value}, they are:"  # spelled as published
    )
