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
    "global": over_model,
}
