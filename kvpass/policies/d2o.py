"""Layer budgets from how evenly attention falls, and dropped entries merged into similar kept ones (D2O, arXiv
2406.13035)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from kvpass.budget import even_split
from kvpass.kernels.entries import Entries
from kvpass.kernels.group import gather_groups, nearest, segment_sum
from kvpass.kernels.mix import Kept, mix
from kvpass.kernels.score import compact
from kvpass.policies.accumulated import Accumulated

Mode = Literal["paper", "code"]


@dataclass(frozen=True)
class D2O(Accumulated):
    """Heavy hitters and recent entries; the dropped ones at least as similar to a kept one as the layer's mean
    merge into it, the others are lost.

    A layer's share of the budget is softmax(-variance) over layers, the variance being that of accumulated
    attention along the row, scaled to [0, 1] over the layer's heads and averaged over them. The published code
    besides leaves ``uncompressed=(0, 1, -1)`` whole without counting them; here they are charged, so that
    policies compare at equal bytes, and a budget that does not hold them is refused.

    ``mode="paper"`` merges keys and values with weights exp(u) of each member and e of the target over their
    sum; ``"code"`` takes (k + sum u k_e) / (1 + members). The mean similarity is taken anew at each compression;
    the published running mean of decoding is not kept.
    """

    mode: Mode = "paper"
    recent_share: float = 0.5  # of a row's quota
    uncompressed: tuple[int, ...] = ()
    votes: bool = False  # ablation: a target's vote counts its members

    name: ClassVar[str] = "d2o"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {self.mode!r}")
        if not 0 <= self.recent_share <= 1:
            raise ValueError(f"recent_share must be in [0, 1], got {self.recent_share}")

    def allocate(self, scores: Sequence[Tensor], totals: Sequence[int]) -> list[Tensor]:
        """Entries per row, [B, Hkv] a layer, split evenly over the heads of a layer; totals are met exactly.

        Raises:
            ValueError: where a total does not hold the uncompressed layers and an entry for every other row.
        """
        room = torch.stack([(~s.isneginf()).sum((1, 2)) for s in scores])  # [L, B]
        heads = torch.tensor([s.shape[1] for s in scores], device=room.device)
        total = torch.minimum(torch.as_tensor(totals, device=room.device), room.sum(0))
        whole = torch.zeros(len(scores), dtype=torch.bool, device=room.device)
        whole[[n for n in self.uncompressed if -len(scores) <= n < len(scores)]] = True
        fixed = torch.where(whole[:, None], room, 0)
        least_sum = fixed.sum(0) + heads[~whole].sum()
        if ((least_sum > total) & (total < room.sum(0))).any():
            raise ValueError(
                f"a budget of {total.tolist()} entries does not hold the uncompressed layers' {fixed.sum(0).tolist()} "
                "and one entry for every other row"
            )
        share = torch.softmax(-torch.stack([_unevenness(s) for s in scores]), 0).masked_fill(whole[:, None], 0)
        least = torch.where(whole[:, None], room, torch.minimum(heads[:, None], room))
        layer = _proportional(share, least, room, total)
        return [even_split(layer[i], (~s.isneginf()).sum(-1)) for i, s in enumerate(scores)]

    def build(self, layer: int, entries: Entries, mass: Tensor, quota: Tensor) -> Entries:
        keep = self.heavy_and_recent(entries, mass, quota, (quota * self.recent_share).long())
        kept = Kept(*compact(keep))
        dropped, is_dropped = compact(entries.valid & ~keep)
        if not is_dropped.any():
            return entries.take(*kept)
        similarity, choice = nearest(entries.k, dropped, *kept)
        count = is_dropped.sum((1, 2)).clamp(min=1)
        mean = similarity.masked_fill(~is_dropped, 0).sum((1, 2)) / count
        joins = is_dropped & (similarity >= mean[:, None, None])
        groups = gather_groups(entries, kept.index, dropped, choice, joins, similarity)

        # A target's own weight: e against exp(u) is a similarity of 1, and u = 1 in the code's mean.
        every = similarity.new_ones(*keep.shape[:2], keep.shape[2] + 1)  # one more slot for what is unused
        every.scatter_(-1, dropped.masked_fill(~is_dropped, keep.shape[2]), similarity)
        u = every[..., :-1].reshape(-1).index_select(0, groups.member)
        own = (u.exp() if self.mode == "paper" else torch.ones_like(u)).double()
        total = segment_sum(own, groups.target, kept.index.numel()).index_select(0, groups.target)
        weight = own / total if self.mode == "paper" else u.double() / total
        return mix(entries, kept, groups, weight, votes=self.votes)


def _unevenness(score: Tensor) -> Tensor:
    """[B]: variance of accumulated attention along each row, min-max scaled over heads, averaged over them."""
    used = score.isfinite()
    count = used.sum(-1).clamp(min=1)
    mass = score.masked_fill(~used, 0)
    mean = mass.sum(-1) / count
    spread = ((mass - mean.unsqueeze(-1)).square() * used).sum(-1) / count
    low, high = spread.amin(-1, keepdim=True), spread.amax(-1, keepdim=True)
    return ((spread - low) / (high - low).clamp(min=torch.finfo(spread.dtype).tiny)).mean(-1)


def _proportional(share: Tensor, least: Tensor, room: Tensor, total: Tensor) -> Tensor:
    """[L, B] int64 nearest below ``share`` of what is left, within [``least``, ``room``]; sums to ``total`` [B]."""
    found = torch.empty_like(room)
    for b in range(room.shape[1]):
        low, high = 0.0, 4.0 * float(total[b]) * len(share)
        part, floor, most = share[:, b].double(), least[:, b], room[:, b]
        part = part / part.sum().clamp(min=torch.finfo(part.dtype).tiny)
        # The largest scale whose floors still fit; what they leave goes to the largest remainders.
        for _ in range(60):
            middle = (low + high) / 2
            fits = torch.minimum((part * middle).long().maximum(floor), most).sum() <= total[b]
            low, high = (middle, high) if fits else (low, middle)
        own = torch.minimum((part * low).long().maximum(floor), most)
        rest = int(total[b] - own.sum())
        order = (part * low - own).masked_fill(own >= most, -torch.inf).argsort(descending=True, stable=True)
        while rest > 0:
            for layer in order.tolist():
                if rest and own[layer] < most[layer]:
                    own[layer] += 1
                    rest -= 1
        found[:, b] = own
    return found
