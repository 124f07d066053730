"""Merge runs of consecutive tokens with similar keys, by a Gaussian kernel around a pivot (KVMerger, arXiv
2407.08454)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, pad

from kvpass.kernels.entries import Entries
from kvpass.kernels.group import Groups, segment_sum
from kvpass.kernels.mix import Kept, mix
from kvpass.kernels.score import compact, working_dtype
from kvpass.policies.accumulated import Accumulated

ValueScale = Literal["members", "mean"]


@dataclass(frozen=True)
class KVMerger(Accumulated):
    """The last entries of a row and those with most accumulated attention stay as they are; of the others, every
    run of neighbours whose cosine exceeds a threshold becomes one entry.

    The threshold is not given but found: the one that leaves exactly the quota, never below ``least`` (where
    that leaves too many, single entries with the least attention are lost, then runs). A run's pivot is its
    member with most attention; members weigh exp(-|k_pivot - k|^2 / 2 sigma^2), normalised. The shares of
    ``recent`` and ``heavy`` are those of the published 35 % setting, relative to the budget.

    The paper multiplies a run's value by its members, ``value_scale="members"``. The softmax denominator does not
    grow with it, so outputs do: below a third of the entries that destroyed SmolLM2's, hence the plain mean.
    """

    sinks: int = 0  # the paper has none: they are heavy
    recent_share: float = 0.23
    heavy_share: float = 0.06
    least: float = 0.0
    sigma: float | None = None  # None: the mean distance to the pivot, which has the scale of the keys
    value_scale: ValueScale = "mean"  # members: times the number of members, as published
    votes: bool = False  # ablation: the vote counts the members, and the value is their weighted mean

    name: ClassVar[str] = "kvmerger"

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.recent_share, self.heavy_share) < 0 or self.recent_share + self.heavy_share > 1:
            raise ValueError("recent_share and heavy_share are shares of a row's quota, together at most 1")
        if self.sigma is not None and self.sigma <= 0:
            raise ValueError(f"sigma must be positive, got {self.sigma}")
        if not -1 <= self.least <= 1:
            raise ValueError(f"least is a cosine in [-1, 1], got {self.least}")
        if self.value_scale not in get_args(ValueScale):
            raise ValueError(f"value_scale must be one of {', '.join(get_args(ValueScale))}, got {self.value_scale!r}")

    def build(self, layer: int, entries: Entries, mass: Tensor, quota: Tensor) -> Entries:
        valid = entries.valid
        if not (valid.sum(-1) > quota).any():
            return entries.take(*compact(valid))
        recent = (quota * self.recent_share).long().clamp(min=1)
        heavy = (quota * self.heavy_share).long() + self.sinks
        reserved = self.heavy_and_recent(entries, mass, torch.minimum(recent + heavy, quota), recent)
        others = valid & ~reserved
        run = self._runs(entries, others, quota - reserved.sum(-1))

        # One id per run over all rows, the pivot of each, and which runs are kept.
        rows, slots = valid.shape[0] * valid.shape[1], valid.shape[2]
        at = others.reshape(-1).nonzero().flatten()
        row = at // slots
        ids, size = (row * slots + run.reshape(-1)[at]).unique_consecutive(return_inverse=True, return_counts=True)[1:]
        weight = mass.reshape(-1)[at]
        order = weight.argsort(descending=True, stable=True)
        order = order[ids[order].argsort(stable=True)]
        first = size.cumsum(0) - size
        pivot = order[first]  # into the members
        stays = self._stays(size, weight[pivot], row[first], quota.reshape(-1) - reserved.sum(-1).reshape(-1))

        pivots = torch.zeros(rows * slots, dtype=torch.bool, device=at.device)
        pivots[at[pivot[stays]]] = True
        keep = reserved | pivots.reshape(valid.shape)
        kept = Kept(*compact(keep))
        many = stays & (size > 1)
        member = many[ids]
        slot = (keep.cumsum(-1) - 1).reshape(-1)[at[pivot]][ids] + row * kept.index.shape[-1]
        member_at, target, own_pivot, group = at[member], slot[member], at[pivot][ids][member], ids[member]
        merged = torch.zeros(kept.index.numel(), dtype=torch.bool, device=at.device)
        merged[target] = True
        groups = Groups(member_at, target, merged.reshape(kept.index.shape))
        share = self._gaussian(entries, member_at, own_pivot, group, len(size))
        scale = 1 if self.votes or self.value_scale == "mean" else size[group]
        return mix(entries, kept, groups, share, share * scale, votes=self.votes)

    def _runs(self, entries: Entries, others: Tensor, sets: Tensor) -> Tensor:
        """[B, Hkv, N]: the run each of ``others`` belongs to, ``sets`` [B, Hkv] of them where ``least`` permits.

        A threshold between two neighbouring cosines joins exactly the pairs above it, so the search over
        thresholds is a choice of the most similar pairs.
        """
        k = entries.k.to(working_dtype(entries.k))
        similarity = pad(cosine_similarity(k[:, :, 1:], k[:, :, :-1], dim=-1, eps=1e-12), (1, 0))
        linked = others & pad(others[..., :-1], (1, 0))
        linked &= similarity > self.least
        similarity = similarity.masked_fill(~linked, -torch.inf)
        order = similarity.argsort(dim=-1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(
            -1, order, torch.arange(order.shape[-1], device=k.device).expand_as(order)
        )
        linked &= rank < (others.sum(-1) - sets).unsqueeze(-1)
        return (~linked).cumsum(-1)

    def _stays(self, size: Tensor, weight: Tensor, row: Tensor, sets: Tensor) -> Tensor:
        """[runs] bool: ``sets`` runs of each row; runs of several before single ones, then by their pivot's mass."""
        order = weight.argsort(descending=True, stable=True)
        order = order[(size[order] == 1).to(torch.int8).argsort(stable=True)]
        order = order[row[order].argsort(stable=True)]
        place = torch.arange(len(order), device=order.device) - torch.searchsorted(row[order], row[order])
        stays = torch.zeros_like(order, dtype=torch.bool)
        stays[order] = place < sets[row[order]]
        return stays

    def _gaussian(self, entries: Entries, member: Tensor, pivot: Tensor, group: Tensor, groups: int) -> Tensor:
        """[T] normalised kernel weights of each member's key around its pivot's."""
        k = entries.k.reshape(-1, entries.k.shape[-1])
        apart = (k[member].double() - k[pivot].double()).square().sum(-1)
        if self.sigma is None:
            count = segment_sum((member != pivot).double(), group, groups).clamp(min=1)
            sigma = (segment_sum(apart.sqrt(), group, groups) / count)[group]
            apart = torch.where(sigma > 0, apart / sigma.square().clamp(min=torch.finfo(sigma.dtype).tiny), 0)
        else:
            apart = apart / self.sigma**2
        weight = (-apart / 2).exp()
        return weight / segment_sum(weight, group, groups)[group]
