"""Merging with given weights, as the methods do that merge without an account of attention mass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.kernels.entries import Entries
from kvpass.kernels.group import Groups, segment_logsumexp, segment_sum
from kvpass.kernels.score import working_dtype


class Kept(NamedTuple):
    """Retained entries of each row, [B, Hkv, M]: ``index`` int64 into N, and which slots are used."""

    index: Tensor
    used: Tensor


def mix(
    entries: Entries, kept: Kept, groups: Groups, weight: Tensor, value_weight: Tensor | None = None, *, votes: bool
) -> Entries:
    """The retained entries, each the weighted sum of its group; those without members bitwise unchanged.

    Args:
        entries: all entries [B, Hkv, N].
        groups: flat members by target; a target is a member of its own group.
        weight: [T] of each member's key, and of its value unless ``value_weight`` [T] is given.
        votes: the log-vote becomes that of all members together; otherwise it stays the target's.
    """
    out = entries.take(*kept)
    if not groups.member.numel():
        return out
    dtype = working_dtype(entries.k)
    shape = (*out.tokens.shape, -1)
    count = out.tokens.numel()

    def summed(x: Tensor, by: Tensor, before: Tensor) -> Tensor:
        own = x.reshape(-1, x.shape[-1]).index_select(0, groups.member).to(dtype)
        total = segment_sum(by.to(dtype).unsqueeze(1) * own, groups.target, count)
        return torch.where(groups.merged.unsqueeze(-1), total.reshape(shape).to(x.dtype), before)

    tokens = segment_sum(entries.tokens.reshape(-1).index_select(0, groups.member), groups.target, count)
    log_votes = out.log_votes
    if votes:
        own = entries.log_votes.reshape(-1).index_select(0, groups.member)
        together = segment_logsumexp(own, groups.target, count).reshape(out.tokens.shape)
        log_votes = torch.where(groups.merged, together, log_votes)
    return Entries(
        k=summed(entries.k, weight, out.k),
        v=summed(entries.v, weight if value_weight is None else value_weight, out.v),
        log_votes=log_votes,
        tokens=torch.where(groups.merged, tokens.reshape(out.tokens.shape), out.tokens),
        pos=out.pos,
    )
