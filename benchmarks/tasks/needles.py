"""Needles in a haystack: RULER's eight retrieval tasks (arXiv 2404.06654, section 3.1)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvpass.benchmarks.tasks.lengths import fill
from kvpass.benchmarks.tasks.sample import Sample
from kvpass.benchmarks.tasks.vocabulary import NOISE, number, sentences, uuid4, word

_DRAW: dict[str, Callable[[random.Random], str]] = {"word": word, "number": number, "uuid": uuid4}
_TOKENS = {"number": 12, "uuid": 48}  # to generate for one value
_DEPTHS = 40  # places, evenly over the haystack, where a needle may stand


@dataclass(frozen=True)
class Needles:
    """One retrieval task: what the haystack is made of, what is hidden how often, and how many keys are asked for."""

    haystack: Literal["noise", "prose", "needles"]
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def __call__(self, name: str, tokenizer, length: int, count: int, seed: int, data: Path | None) -> list[Sample]:
        """``count`` samples, each with the largest haystack that fits ``length`` tokens."""
        prose = sentences(data) if self.haystack == "prose" else ()
        samples = []
        for index in range(count):
            key = f"{name} {seed} {index}"
            sample = fill(lambda size, key=key: self._sample(name, key, size, prose), length, tokenizer)
            if sample is None:
                raise ValueError(f"{name}: {length} tokens do not hold the needles and the question")
            samples.append(sample)
        return samples

    def _sample(self, name: str, key: str, size: int, prose: tuple[str, ...]) -> Sample:
        draw = random.Random(key)
        keys = _different(self.keys, lambda: _DRAW[self.key](draw))
        values = _different(self.keys * self.values, lambda: _DRAW[self.value](draw))
        kind = f"{self.value}s"
        pairs = [(keys[index // self.values], value) for index, value in enumerate(values)]
        needles = [_needle(kind, *pair) for pair in pairs]
        asked = draw.sample(keys, self.queries)
        answers = [value for name in asked for owner, value in pairs if owner == name]
        depths = sorted(draw.sample(range(_DEPTHS), len(needles)))
        draw.shuffle(needles)
        lines, joiner = self._haystack(draw, size, prose, kind, taken=set(keys))
        for needle, depth in reversed(list(zip(needles, depths, strict=True))):
            lines.insert(len(lines) * depth // (_DEPTHS - 1), needle)
        if self.values > 1:  # in the order of the text, which is how a reader would list them
            answers.sort(key=joiner.join(lines).index)
        prefix, suffix = _question(kind, asked, single=len(answers) == 1)
        return Sample(
            task=name,
            id=key.replace(" ", "-"),
            family="retrieval",
            prefix=prefix,
            context=joiner.join(lines),
            suffix=suffix,
            answers=tuple(answers),
            metric="match_all",
            new_tokens=_TOKENS[self.value] * len(answers) + 4,
            gold=listed(answers),
        )

    def _haystack(self, draw: random.Random, size: int, prose, kind: str, taken: set[str]) -> tuple[list[str], str]:
        if self.haystack == "noise":
            return [NOISE] * size, "\n"
        if self.haystack == "prose":
            first = draw.randrange(len(prose))
            return [prose[(first + step) % len(prose)] for step in range(size)], " "
        keys = _different(size + len(taken), lambda: _DRAW[self.key](draw))
        others = [key for key in keys if key not in taken][:size]
        return [_needle(kind, key, _DRAW[self.value](draw)) for key in others], "\n"


def listed(parts: list[str]) -> str:
    """ "a", "a and b", "a, b, and c"."""
    return " and ".join(parts) if len(parts) < 3 else ", ".join(parts[:-1]) + f", and {parts[-1]}"


def _needle(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


def _question(kind: str, asked: list[str], single: bool) -> tuple[str, str]:
    """RULER's wording, in the singular where there is one answer."""
    one = kind.removesuffix("s")
    some, all_, are, kind = ("A", "What is the", "is", one) if single else ("Some", "What are all the", "are", kind)
    verb = "is" if single else "are"
    prefix = (
        f"{some} special magic {kind} {verb} hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind} afterwards.\n"
    )
    about = f"special magic {kind} for {listed(asked)} mentioned in the provided text"
    return prefix, f"\n{all_} {about}? The {about} {are}"


def _different(count: int, draw: Callable[[], str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)


NEEDLES: dict[str, Needles] = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("prose"),
    "niah_single_3": Needles("prose", value="uuid"),
    "niah_multikey_1": Needles("prose", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key="uuid", value="uuid"),
    "niah_multivalue": Needles("prose", values=4),
    "niah_multiquery": Needles("prose", keys=4, queries=4),
}
