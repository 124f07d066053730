"""Texts of a wanted length in tokens: windows at word boundaries, and the largest size that still fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from kvpass.benchmarks.tasks.sample import Sample, encode, tokens_of

_CHARS_A_TOKEN = 8  # more than running text has
_LONGEST_WORD = 100  # characters; in a text without spaces, cuts fall between any two tokens


def count(sample: Sample, tokenizer) -> int:
    """Tokens of the prompt as it is fed, chat template included."""
    return len(encode(sample, tokenizer).prompt)


def words_within(text: str, tokens: int, tokenizer) -> int:
    """Characters of the longest beginning of ``text`` with at most ``tokens`` tokens; it ends before a space."""
    reach = tokens * _CHARS_A_TOKEN
    ends = tokens_of(text[:reach], tokenizer)[1]
    if len(ends) <= tokens:
        return min(reach, len(text))
    whole = bisect_left(ends, ends[tokens], hi=tokens)  # a character may be several tokens
    cut = ends[whole - 1] if whole else 0
    spaces = (place for place in range(cut, max(cut - _LONGEST_WORD, 0), -1) if text[place].isspace())
    return next(spaces, cut)


def fill(make: Callable[[int], Sample], length: int, tokenizer, most: int | None = None) -> Sample | None:
    """``make(size)`` of the largest size in [1, most] with at most ``length`` tokens; None when size 1 has more.

    ``make`` is pure and its prompt grows with ``size``, without end where ``most`` is None.
    """
    low, below = 0, 0
    high = 8 if most is None else min(8, most)
    while (above := count(make(high), tokenizer)) <= length:
        if high == most:
            return make(high)
        low, below, high = high, above, high * 2 if most is None else min(high * 2, most)
    steps = 0
    while high - low > 1:
        # Prompts grow about evenly, so a line through both ends is near; halving makes sure that it ends soon.
        share = (length - below) / (above - below) if steps < 6 else 0.5
        middle = min(max(low + int((high - low) * share), low + 1), high - 1)
        tokens = count(make(middle), tokenizer)
        low, below, high, above = (middle, tokens, high, above) if tokens <= length else (low, below, middle, tokens)
        steps += 1
    return make(low) if low else None


def cut_middle(sample: Sample, length: int, tokenizer) -> Sample | None:
    """The sample with the middle of its context left out, so that ``length`` tokens remain (LongBench's truncation).

    Halves are cut at spaces, and a context of which nothing would remain gives None.
    """
    if not _surely_longer(sample, length) and count(sample, tokenizer) <= length:
        return sample
    room = length - count(replace(sample, context=""), tokenizer)
    reach = max(room, 0) * _CHARS_A_TOKEN
    text = sample.context
    first, last = (text[:reach], text[-reach:]) if len(text) > 2 * reach else (text, text)
    while room >= 2:
        context = first[: words_within(first, room // 2, tokenizer)] + _last_words(last, room // 2, tokenizer)
        over = count(shorter := replace(sample, context=context), tokenizer) - length
        if over <= 0:
            return shorter
        room -= over  # the seam is tokenised differently from the halves alone
    return None


def _surely_longer(sample: Sample, length: int) -> bool:
    return len(sample.context) > 64 * length  # not worth tokenising megabytes to know


def _last_words(text: str, tokens: int, tokenizer) -> str:
    """The longest end of ``text`` with at most ``tokens`` tokens; it begins at a space."""
    text = text[-tokens * _CHARS_A_TOKEN :]
    ends = tokens_of(text, tokenizer)[1]
    cut = ends[-tokens - 1] if len(ends) > tokens else 0
    spaces = (place for place in range(cut, min(cut + _LONGEST_WORD, len(text))) if text[place].isspace())
    return text[next(spaces, cut) if cut else 0 :]
