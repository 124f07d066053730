"""Common and frequent words: what occurs most in a long list (RULER, arXiv 2404.06654, section 3.3)."""

from __future__ import annotations

import math
import random
from pathlib import Path

from kvpass.benchmarks.tasks.lengths import fill
from kvpass.benchmarks.tasks.sample import Sample
from kvpass.benchmarks.tasks.vocabulary import letters, plain_words

_COMMON = 10
_SHORT = 4096  # tokens below which words are repeated less, so that there still are others


def common_words(tokenizer, length: int, count: int, seed: int, data: Path | None) -> list[Sample]:
    """``count`` numbered lists in which ten words occur far more often than the others, after one solved example."""
    shape = (6, 1, 20, 3, 1) if length < _SHORT else (30, 3, 40, 10, 3)
    most = len(plain_words()) - _COMMON
    return _filled("cwe", lambda key, size: _common(key, size, *shape), tokenizer, length, count, seed, most)


def frequent_words(tokenizer, length: int, count: int, seed: int, data: Path | None) -> list[Sample]:
    """``count`` texts of coded words with Zipf frequencies; the three most frequent after the dots are asked for."""
    kinds = max(length // 50, 8)
    return _filled("fwe", lambda key, size: _frequent(key, size, kinds), tokenizer, length, count, seed, None)


def _filled(name: str, make, tokenizer, length: int, count: int, seed: int, most: int | None) -> list[Sample]:
    samples = []
    for index in range(count):
        key = f"{name} {seed} {index}"
        sample = fill(lambda size, key=key: make(key, size), length, tokenizer, most)
        if sample is None:
            raise ValueError(f"{name}: {length} tokens do not hold the shortest list")
        samples.append(sample)
    return samples


def _common(key: str, size: int, times: int, rest: int, example: int, example_times: int, example_rest: int) -> Sample:
    draw = random.Random(key)
    shown, shown_words = _numbered(draw, example - _COMMON, example_times, example_rest)
    context, wanted = _numbered(draw, size, times, rest)
    head = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    )
    question = (
        f"\nQuestion: What are the {_COMMON} most common words in the above list? "
        f"Answer: The top {_COMMON} words that appear most often in the list are:"
    )
    return Sample(
        task="cwe",
        id=key.replace(" ", "-"),
        family="reasoning",
        prefix=f"{head}{shown}{question} {_numbers(shown_words)}\n\n{head}",
        context=context,
        suffix=question,
        answers=tuple(wanted),
        metric="match_all",
        new_tokens=80,
        gold=_numbers(wanted),
    )


def _numbered(draw: random.Random, others: int, times: int, rest: int) -> tuple[str, list[str]]:
    """A shuffled list of ten words ``times`` times each and ``others`` words ``rest`` times, and the ten words."""
    chosen = draw.sample(plain_words(), _COMMON + others)
    common = chosen[:_COMMON]
    words = common * times + chosen[_COMMON:] * rest
    draw.shuffle(words)
    return _numbers(words), common


def _numbers(words: list[str]) -> str:
    return " ".join(f"{index}. {word}" for index, word in enumerate(words, 1))


def _frequent(key: str, size: int, kinds: int) -> Sample:
    draw = random.Random(key)
    coded: list[str] = []
    while len(coded) < kinds:
        word = letters(draw, 6)
        coded += [word] * (word not in coded)
    wanted, coded[0] = coded[1:4], "..."
    total = size + 60  # from here on the third word is more frequent than the fourth
    zeta = math.pi**2 / 6
    words = [word for rank, word in enumerate(coded, 1) for _ in range(int(total / rank**2 / zeta))]
    draw.shuffle(words)
    return Sample(
        task="fwe",
        id=key.replace(" ", "-"),
        family="reasoning",
        prefix=(
            "Read the following coded text and track the frequency of each coded word. "
            "Find the three most frequently appeared coded words.\n"
        ),
        context=" ".join(words),
        suffix=(
            "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
            "frequently appeared words in the above coded text? Answer: According to the coded text above, the three "
            "most frequently appeared words are:"
        ),
        answers=tuple(wanted),
        metric="match_all",
        new_tokens=30,
        gold=" ".join(wanted),
    )
