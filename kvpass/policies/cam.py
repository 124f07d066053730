"""Spread the values of dropped entries over the kept ones that follow (CaM, Zhang et al., ICML 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from kvpass.kernels.entries import Entries
from kvpass.kernels.score import compact, working_dtype
from kvpass.policies.accumulated import Accumulated

Keep = Literal["heavy", "streaming"]


@dataclass(frozen=True)
class CaM(Accumulated):
    """Half a row's quota is recent. A dropped entry's value joins, with the probability that its attention a
    query bears to the mean of the ``spread`` kept entries after it (at most 1), those entries' values, divided by
    their number. Its key is lost. Values grow, as published, and that destroyed SmolLM2's output at a fifth
    of the entries: the method was made for an entry a step, not for a prompt at once.

    The published cache keeps the first entries beside the recent ones, ``keep="streaming"``, and drops one entry
    a step. A prompt drops most of its entries at once, all of them onto the head of the recent half then; with
    ``"heavy"`` the other half are the entries with most accumulated attention.
    """

    keep: Keep = "heavy"
    spread: int = 32  # kept entries that share a value
    seed: int = 0  # of the Bernoulli draws, one an entry and KV head
    deterministic: bool = False  # the draws' expectation instead
    votes: bool = False  # ablation: a receiver's vote grows by the share of an entry that its value receives

    name: ClassVar[str] = "cam"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep not in get_args(Keep):
            raise ValueError(f"keep must be one of {', '.join(get_args(Keep))}, got {self.keep!r}")
        if self.spread < 1:
            raise ValueError(f"spread must be >= 1, got {self.spread}")

    def build(self, layer: int, entries: Entries, mass: Tensor, quota: Tensor) -> Entries:
        recent = (quota // 2).clamp(min=1)
        if self.keep == "heavy":
            keep = self.heavy_and_recent(entries, mass, quota, recent)
        else:
            order = entries.valid.cumsum(-1)
            first = order <= (quota - recent).unsqueeze(-1)
            keep = entries.valid & (first | (order > entries.lengths.unsqueeze(-1) - recent.unsqueeze(-1)))
        index, used = compact(keep)
        out = entries.take(index, used)
        dropped, is_dropped = compact(entries.valid & ~keep)
        if not is_dropped.any():
            return out

        # Receivers of a dropped entry: kept slots from its rank among them, as many as there are.
        dtype = working_dtype(entries.k)
        # Attention per query that could pay it: sums would call every entry negligible beside an older one.
        age = (entries.pos.amax(-1, keepdim=True) - entries.pos + 1).clamp(min=1)
        mass = mass.double() / age
        held = mass.gather(-1, index).masked_fill(~used, 0)
        start = keep.cumsum(-1).gather(-1, dropped)
        stop = torch.minimum(start + self.spread, used.sum(-1, keepdim=True))
        before = torch.nn.functional.pad(held.cumsum(-1), (1, 0))
        mean = (before.gather(-1, stop) - before.gather(-1, start)) / (stop - start)
        chance = (mass.gather(-1, dropped) / mean).nan_to_num(0.0, posinf=1.0).clamp(0, 1)
        if not self.deterministic:
            chance = (self._draws(layer, entries).gather(-1, dropped) < chance).to(dtype)
        part = torch.where(is_dropped, chance / (stop - start), 0).to(dtype)

        rows, most = index.shape[0] * index.shape[1], index.shape[2]
        base = (torch.arange(rows, device=index.device) * most).reshape(*index.shape[:2], 1)
        value = entries.v.to(dtype).gather(2, dropped.unsqueeze(-1).expand(-1, -1, -1, entries.v.shape[-1]))
        given = torch.zeros(rows * most, value.shape[-1] + 1, dtype=dtype, device=index.device)
        source = torch.cat([value, value.new_ones(*value.shape[:3], 1)], -1) * part.unsqueeze(-1)
        for step in range(int((stop - start).max())):
            reached = is_dropped & (start + step < stop)
            given.index_add_(0, (base + start + step)[reached], source[reached])
        given = given.reshape(*index.shape, -1)
        share = given[..., -1]
        v = torch.where(share.unsqueeze(-1) > 0, (out.v.to(dtype) + given[..., :-1]).to(out.v.dtype), out.v)
        log_votes = torch.logaddexp(out.log_votes, share.log().to(out.log_votes.dtype)) if self.votes else out.log_votes
        return Entries(k=out.k, v=v, log_votes=log_votes, tokens=out.tokens, pos=out.pos)

    def _draws(self, layer: int, entries: Entries) -> Tensor:
        """[B, Hkv, N] uniform in [0, 1): by layer, head and position, so that no other sequence changes them."""
        generator = torch.Generator().manual_seed(self.seed * 100_003 + layer)
        heads, last = entries.pos.shape[1], int(entries.pos.max())
        drawn = torch.rand(last + 1, heads, generator=generator, dtype=torch.float64).to(entries.pos.device)
        return drawn.T.expand(entries.pos.shape[0], -1, -1).gather(-1, entries.pos.long().clamp(min=0))
