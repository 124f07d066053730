"""How many entries each row keeps, given the scores of all rows. Totals are met exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvpass.budget import even_split


def uniform(scores: Sequence[Tensor], totals: Sequence[int], *, floor: float = 0.0) -> list[Tensor]:
    """Every row the same, as far as its length permits."""
    widths = [s.shape[1] for s in scores]
    available = torch.cat([(~s.isneginf()).sum(-1) for s in scores], 1)
    split = even_split(torch.as_tensor(totals, dtype=torch.int64, device=available.device), available)
    return list(split.split(widths, 1))


def per_layer(scores: Sequence[Tensor], totals: Sequence[int], *, floor: float = 0.2) -> list[Tensor]:
    """Layers as in :func:`uniform`; inside a layer the heads compete (AdaKV, arXiv 2407.11550).

    Each head first keeps its ``floor`` share of the even split; the remainder goes to the highest scores of
    the layer.
    """
    even = uniform(scores, totals)
    return [_compete(score, quota, floor) for score, quota in zip(scores, even, strict=True)]


def over_model(scores: Sequence[Tensor], totals: Sequence[int], *, floor: float = 0.2) -> list[Tensor]:
    """All rows of all layers compete, above the same ``floor``. Scores must be comparable between layers."""
    widths = [s.shape[1] for s in scores]
    longest = max(s.shape[-1] for s in scores)
    padded = [torch.nn.functional.pad(s, (0, longest - s.shape[-1]), value=-torch.inf) for s in scores]
    even = torch.cat(uniform(scores, totals), 1)
    return list(_compete(torch.cat(padded, 1), even, floor).split(widths, 1))


def blend(scores: Sequence[Tensor], totals: Sequence[int], *, floor: float = 0.2) -> list[Tensor]:
    """AdaKV's safeguard as released: a head's count is what it wins in its layer, ``floor`` of it evened out.

    A head that wins ``m`` of the layer's open entries gets ``round((1 - floor) m + floor c)``, where ``c`` is the
    even share; rounding is made good within the layer. Pinned entries stand outside.
    """
    quotas = []
    for score, even in zip(scores, uniform(scores, totals), strict=True):
        won = _compete(score, even, 0.0)
        pinned = torch.minimum(score.isposinf().sum(-1), won)
        share = (floor * (even - pinned)).floor()
        wanted = pinned + ((won - pinned) * (1 - floor) + share).round().long()
        quotas.append(fit(wanted, even.sum(-1), (~score.isneginf()).sum(-1)))
    return quotas


def fit(wanted: Tensor, totals: Tensor, available: Tensor) -> Tensor:
    """``wanted`` [B, R] int64 changed as evenly as possible until each sequence sums to ``totals`` [B].

    No row exceeds ``available`` [B, R] or, where the total permits, falls below one entry.
    """
    wanted = torch.minimum(wanted.clamp(min=1), available)
    missing = torch.minimum(totals, available.sum(-1)) - wanted.sum(-1)
    wanted = wanted + even_split(missing.clamp(min=0), available - wanted)
    wanted = wanted - even_split((-missing).clamp(min=0), (wanted - 1).clamp(min=0))
    return wanted - even_split((wanted.sum(-1) - totals).clamp(min=0), wanted)


def _compete(score: Tensor, even: Tensor, floor: float) -> Tensor:
    """Share out ``even`` [B, R] anew among the rows of ``score`` [B, R, N]: pinned and floor first."""
    batch, rows, slots = score.shape
    pinned = score.isposinf().sum(-1)
    least = torch.maximum(pinned, (even * floor).long())
    # Where the even split does not hold the pinned entries there is nothing to compete for.
    least = torch.where((pinned > even).any(-1, keepdim=True), even, least)
    rest = (even - least).sum(-1)
    ordered = score.sort(dim=-1, descending=True).values
    settled = torch.arange(slots, device=score.device) < least.unsqueeze(-1)
    flat = ordered.masked_fill(settled, -torch.inf).reshape(batch, rows * slots)
    order = flat.argsort(dim=-1, descending=True, stable=True)
    wins = torch.arange(rows * slots, device=score.device) < rest.unsqueeze(-1)
    return least.scatter_add(-1, order // slots, wins.long())


ALLOCATORS: dict[str, Callable[..., list[Tensor]]] = {
    "uniform": uniform,
    "layer": per_layer,
    "blend": blend,
    "global": over_model,
}
