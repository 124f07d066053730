"""How many cache entries a sequence may keep, in exact integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real

import torch
from torch import Tensor

_ACCEPTED = "budget must be a float in (0, 1] (fraction of entries kept) or an int >= 1 (entries per row)"


@dataclass(frozen=True)
class Budget:
    """A fraction of the prompt's entries, or entries per row on average; build it with :meth:`parse`."""

    fraction: Fraction | None = None
    entries: int | None = None

    @classmethod
    def parse(cls, value: float | int | Budget) -> Budget:
        """Read a user's budget.

        A float in (0, 1] is the fraction of the prompt's entries that is kept, taken as the decimal it is
        written as (``0.1`` is exactly one tenth). An int >= 1 is entries per row on average.

        Raises:
            ValueError: for anything else (bool, string, zero, negative, above 1, not finite).
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError(f"{_ACCEPTED}, got {value!r}")
        if isinstance(value, Integral):
            if value < 1:
                raise ValueError(f"{_ACCEPTED}, got {value!r}")
            return cls(entries=int(value))
        if not 0 < value <= 1:  # also false for nan
            raise ValueError(f"{_ACCEPTED}, got {value!r}")
        return cls(fraction=Fraction(str(value)))

    def total(self, lengths: Sequence[int], rows: int) -> list[int]:
        """Entries each sequence keeps over its ``rows`` compressible (layer, KV head) rows.

        At least one entry a row, never more than ``lengths[b] * rows``.
        """
        totals = []
        for length in lengths:
            if self.fraction is not None:
                asked = self.fraction.numerator * int(length) * rows // self.fraction.denominator
            else:
                asked = self.entries * rows
            totals.append(min(max(asked, rows), int(length) * rows))
        return totals

    def uniform(self, lengths: Sequence[int], rows: int) -> Tensor:
        """[B, rows] int64: each sequence's total split as evenly as possible, no row above its length."""
        available = torch.tensor([[int(n)] * rows for n in lengths], dtype=torch.int64).reshape(-1, rows)
        return even_split(torch.tensor(self.total(lengths, rows), dtype=torch.int64), available)


def even_split(totals: Tensor, available: Tensor) -> Tensor:
    """Split ``totals`` [B] over rows as evenly as ``available`` [B, R] (both int64) permits; returns [B, R]
    int64.

    Rows shorter than the even share keep what they have and the others share the rest; the remainder of the
    division goes to the first rows that still have room. Each sequence sums to ``min(totals,
    available.sum(-1))`` exactly.
    """
    totals = torch.minimum(totals, available.sum(-1))
    # The largest level whose filling does not exceed the total, by bisection on integers.
    low = torch.zeros_like(totals)
    high = available.amax(-1) if available.shape[-1] else low.clone()
    while bool((low < high).any()):
        middle = (low + high + 1) // 2
        fits = available.clamp(max=middle[:, None]).sum(-1) <= totals
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle - 1)
    split = available.clamp(max=low[:, None])
    room = available > split
    rest = (totals - split.sum(-1))[:, None]
    return split + (room & (room.cumsum(-1) <= rest)).to(split.dtype)
