"""Queries that run over the full cache after the prompt: which they are, and what they see beside the entries."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvpass.kernels.entries import Entries, Observation


def held_tokens(entries: Entries) -> list[int]:
    """Tokens of each sequence from its first entry to its last."""
    last = entries.pos.masked_fill(~entries.valid, -1).amax((1, 2))
    first = torch.where(entries.valid, entries.pos, last[:, None, None]).amin((1, 2))
    return (last - first + 1).tolist()


def one(entries: Entries, seen: Observation, b: int) -> tuple[Entries, Observation]:
    """Sequence ``b`` of a batch."""
    at = slice(b, b + 1)
    own = {} if seen.own_k is None else {"own_k": seen.own_k[at], "own_pos": seen.own_pos[at]}
    seen = replace(seen, q=seen.q[at], q_pos=seen.q_pos[at], **own)
    return Entries(*(getattr(entries, name)[at] for name in vars(entries))), seen


def last_queries(seen: Observation, count: int) -> tuple[Observation, Observation]:
    """``(earlier, last)``: one sequence's queries before its last ``count`` positions, and those ``count`` in order.

    Raises:
        ValueError: there are fewer.
    """
    first = int(seen.q_pos.max()) + 1 - count if seen.q_pos.numel() else 0
    late = (seen.q_pos >= max(0, first)).sum()
    if late != count:
        raise ValueError(f"the policy judges by {count} queries that it rehearses, and {int(late)} were observed")
    order = seen.q_pos[0].argsort()
    earlier, last = (_at(seen, part) for part in (order[: len(order) - count], order[len(order) - count :]))
    return earlier, last


def with_own(entries: Entries, seen: Observation) -> Entries:
    """Entries, and behind them the keys of observed tokens that are none, so that attention sees both.

    Their values are zeros: only for weights.
    """
    if seen.own_k is None:
        return entries
    batch, heads, more, _ = seen.own_k.shape
    pos = seen.own_pos[:, None].expand(-1, heads, -1)
    used = pos >= 0
    own = Entries(
        k=seen.own_k.to(entries.k.dtype),
        v=entries.v.new_zeros(batch, heads, more, entries.v.shape[-1]),
        log_votes=torch.zeros_like(pos, dtype=entries.log_votes.dtype).masked_fill(~used, -torch.inf),
        tokens=used.to(entries.tokens.dtype),
        pos=pos,
    )
    return Entries(*(torch.cat([getattr(entries, name), getattr(own, name)], 2) for name in vars(entries)))


def _at(seen: Observation, index: Tensor) -> Observation:
    return replace(seen, q=seen.q[:, :, index], q_pos=seen.q_pos[:, index])
