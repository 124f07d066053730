"""Biases that a key can carry itself: linear in its position, with one slope a head (ALiBi, arXiv 2108.12409).

A constant per query cancels in the softmax, so only differences along a row count.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = 1e-6  # of the largest bias: what fp32 loses in a slope times a position


def slopes(
    bias: Tensor, seen: Tensor, rows: Tensor, positions: list[Tensor], known: Tensor | None = None
) -> Tensor | None:
    """[H] fp64 slopes of ``bias`` [2, H, P, P] over the keys ``seen`` [2, P, P] of the real ``rows`` [2, P].

    ``positions`` are the ways [2, P] to count keys that are accepted. None when the bias is not linear in any, or has
    other slopes than ``known``.
    """
    for counted in positions:
        at = counted.to(bias.dtype)[:, None, None]  # [2, 1, 1, P]
        found = _steepness(bias, seen, at) if known is None else known
        rest = bias - found[None, :, None, None] * at
        hidden = ~seen[:, None]
        low, high = rest.masked_fill(hidden, torch.inf).amin(-1), rest.masked_fill(hidden, -torch.inf).amax(-1)
        spread = (high - low).movedim(1, -1)[rows]
        if bool((spread <= ROUNDING * bias.masked_fill(hidden, 0).abs().max()).all()):
            return found.expand(bias.shape[1])
    return None


def _steepness(bias: Tensor, seen: Tensor, at: Tensor) -> Tensor:
    """Slope between the first and the last key that the last query sees."""
    keys = seen[0, -1].nonzero().flatten()
    first, last = keys[0], keys[-1]
    return (bias[0, :, -1, last] - bias[0, :, -1, first]) / (at[0, 0, 0, last] - at[0, 0, 0, first]).clamp(min=1)
