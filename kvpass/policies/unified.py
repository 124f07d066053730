"""KeepKV's merging (arXiv 2504.09936) with GraceKV's question (2608.07001): where does the next entry help most?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.kernels.entries import Entries
from kvpass.kernels.group import nearest
from kvpass.kernels.score import compact, working_dtype
from kvpass.policies.keepkv import KeepKV


@dataclass(frozen=True)
class Unified(KeepKV):
    """Most of a row's entries go to what is attended to most; the others are auctioned among the heads of its layer.

    Attention counts by what it fetches: times the distance of the entry's value from the row's mean value, as the loss
    of an average value changes nothing.

    An entry that is dropped joins the most similar one that is kept, so leaving it out costs its share of the row's
    attention times what that one does not cover: 1 - cosine^2 of their keys. The auction buys the largest such costs.
    Keys, votes and values are then KeepKV's, fitted to the same queries.
    """

    settled: float = 0.7  # share of a row's quota that goes by attention alone
    bidders: float = 4.0  # entries of a row that take part in the auction, as a multiple of its part of the lots

    name: ClassVar[str] = "unified"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.selector != self._own_selector() or self.allocator != "uniform" or self.references < 1:
            raise ValueError("unified chooses and shares out by its own references: no selector, no allocator")
        if not 0 <= self.settled <= 1:
            raise ValueError(f"settled is a share in [0, 1], got {self.settled}")
        if self.bidders < 1:
            raise ValueError(f"bidders must be >= 1, got {self.bidders}")

    def keep(self, entries: Entries, weight: Tensor, quota: Tensor, window: Tensor) -> Tensor:
        weight = weight * _deviation(entries)
        pinned = self.pinned(entries, window)
        settled = torch.maximum((quota * self.settled).long(), torch.minimum(quota, pinned.sum(-1)))
        keep = super().keep(entries, weight, settled, window)
        lots = (quota - settled).sum(-1)
        if not lots.any():
            return keep
        cost = self._costs(entries, weight.masked_fill(pinned, 0), keep, keep & ~pinned, quota - settled).flatten(1)
        order = cost.argsort(dim=-1, descending=True, stable=True)
        wins = torch.arange(order.shape[1], device=order.device) < lots.unsqueeze(-1)
        return keep | torch.zeros_like(wins).scatter_(-1, order, wins).view_as(keep)

    def _costs(self, entries: Entries, weight: Tensor, keep: Tensor, targets: Tensor, lots: Tensor) -> Tensor:
        """[B, Hkv, N] what leaving each entry out costs; -1 where it does not take part, -inf where it cannot."""
        loose = entries.valid & ~keep
        share = weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
        most = (lots * self.bidders).ceil().long().unsqueeze(-1)
        order = share.masked_fill(~loose, -1).argsort(dim=-1, descending=True, stable=True)
        first = torch.arange(order.shape[-1], device=order.device) < most
        bids = torch.zeros_like(loose).scatter_(-1, order, first) & loose
        index, used = compact(bids)
        similar, _ = nearest(entries.k, index, *compact(targets))
        cost = share.gather(-1, index) * (1 - similar.clamp(0, 1).square())
        blank = torch.zeros_like(share).masked_fill_(~loose, -torch.inf).sub_(1)
        # The padding of shorter rows points at slot 0: it writes to a slot that is cut off again.
        room = torch.nn.functional.pad(blank, (0, 1))
        return room.scatter(-1, index.masked_fill(~used, blank.shape[-1]), cost)[..., :-1]


def _deviation(entries: Entries) -> Tensor:
    """[B, Hkv, N] distance of each value from the mean of its row."""
    v = entries.v.to(working_dtype(entries.v))
    valid = entries.valid.unsqueeze(-1)
    known = v if valid.all() else v.masked_fill(~valid, 0)
    mean = known.sum(2, keepdim=True) / valid.sum(2, keepdim=True).clamp(min=1)
    return (v - mean).norm(dim=-1)
