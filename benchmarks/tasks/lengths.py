"""Texts of a wanted length in tokens: windows at word boundaries, and the largest size that still fits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from kvpass.benchmarks.tasks.sample import Sample, encode, tokens_of

_CHARS_A_TOKEN = 8  # more than any text here needs, so that a window's first tokens decide


def count(sample: Sample, tokenizer) -> int:
    """Tokens of the prompt as it is fed, chat template included."""
    return len(encode(sample, tokenizer).prompt)


def words_within(text: str, tokens: int, tokenizer) -> int:
    """Characters of the longest beginning of ``text`` that ends before a space and has at most ``tokens`` tokens."""
    reach = tokens * _CHARS_A_TOKEN
    ends = tokens_of(text[:reach], tokenizer)[1]
    if len(ends) <= tokens:
        return min(reach, len(text))
    fits = ends[bisect_right(ends, ends[tokens] - 1, hi=tokens) - 1] if tokens else 0
    while fits and not text[fits].isspace():
        fits -= 1
    return fits


def largest(make: Callable[[int], Sample], fits: Callable[[Sample], bool], guess: int = 8) -> Sample | None:
    """The sample of the largest size >= 1 that fits, found by doubling and halving; None when size 1 does not fit.

    ``make(size)`` grows with ``size`` and is pure.
    """
    low, high, best = 0, guess, None
    while True:
        sample = make(high)
        if not fits(sample):
            break
        low, best, high = high, sample, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        sample = make(middle)
        if fits(sample):
            low, best = middle, sample
        else:
            high = middle
    return best
