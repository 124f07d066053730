"""Which dropped entry joins which retained one, and sums over such groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.kernels import cpu
from kvpass.kernels.entries import Entries
from kvpass.kernels.score import compact, working_dtype

SIMILARITIES = 1 << 19  # cosine similarities alive at once


@dataclass(frozen=True)
class Groups:
    """Which dropped entries join which retained ones. Both lists are flat over (sequence, KV head)."""

    member: Tensor  # [T] int64 into [B*Hkv*N]: targets and those that join them
    target: Tensor  # [T] int64 into [B*Hkv*M]: the retained slot each member belongs to, ascending
    merged: Tensor  # [B, Hkv, M] bool: retained slots that received members
    own: Tensor | None = None  # [T] bool: the targets among the members
    moves: Tensor | None = None  # [T] bool: members that move the key; None for all


def nearest(keys: Tensor, from_index: Tensor, to_index: Tensor, to_used: Tensor) -> tuple[Tensor, Tensor]:
    """Best cosine similarity of every ``from`` key to the ``to`` keys of its row, in blocks.

    Args:
        keys: [B, Hkv, N, D] keys as stored.
        from_index: [B, Hkv, E] int64 into N.
        to_index, to_used: [B, Hkv, C] int64 and bool.

    Returns:
        similarity [B, Hkv, E] in the working dtype (-inf where a row has no target) and index [B, Hkv, E]
        into C. A zero key has similarity 0.
    """
    batch, heads, slots, dim = keys.shape
    rows, count = batch * heads, from_index.shape[-1]
    place, used = compact(to_used)
    targets = place.shape[-1]
    dtype, flat = working_dtype(keys), keys.reshape(-1, dim)
    best = torch.full((rows, count), -torch.inf, dtype=dtype, device=keys.device)
    index = torch.zeros(rows, count, dtype=torch.int64, device=keys.device)
    if targets == 0:
        return best.reshape(batch, heads, count), index.reshape(batch, heads, count)
    first = torch.arange(0, rows * slots, slots, device=keys.device).unsqueeze(1)
    to = flat.index_select(0, (to_index.gather(-1, place).reshape(rows, targets) + first).flatten())
    to = torch.nn.functional.normalize(to.to(dtype), dim=-1, eps=1e-6)
    to = to.reshape(rows, targets, dim).transpose(1, 2)
    barred = None  # rows of unequal length only
    if not used.all():
        barred = to.new_zeros(rows, 1, targets).masked_fill_(~used.reshape(rows, 1, targets), -torch.inf)
    source = from_index.reshape(rows, count) + first
    width = max(1, SIMILARITIES // (rows * targets))
    for start in range(0, count, width):
        part = slice(start, min(start + width, count))
        own = flat.index_select(0, source[:, part].flatten()).to(dtype)
        dots = torch.bmm(own.reshape(rows, -1, dim), to)
        length = own.norm(dim=-1).clamp_(min=1e-6).reshape(rows, -1)
        # The length of the key that asks does not change which target is best.
        if cpu.supports_weights(dots):
            most, index[:, part] = cpu.best(dots, barred)
        else:
            most, index[:, part] = (dots if barred is None else dots.add_(barred)).max(-1)
        best[:, part] = most / length
    index = place.reshape(rows, targets).gather(1, index)
    return best.reshape(batch, heads, count), index.reshape(batch, heads, count)


def group_by_similarity(
    entries: Entries,
    kept: Tensor,
    kept_used: Tensor,
    open_kept: Tensor,
    dropped: Tensor,
    dropped_used: Tensor,
    *,
    threshold: float,
    max_votes: int,
    gate: Callable[[Tensor], Tensor] | None = None,
    absorb: bool = False,
) -> Groups:
    """Every dropped entry joins its most similar retained one (KeepKV Algorithm 1); the rest stays dropped.

    Args:
        entries: all entries, [B, Hkv, N].
        kept, kept_used: [B, Hkv, M] retained entries as indices into N.
        open_kept: [B, Hkv, M] bool, retained entries that may receive members.
        dropped, dropped_used: [B, Hkv, E] candidates as indices into N.
        threshold: least cosine similarity of stored keys.
        max_votes: most tokens one entry may come to stand for; a target takes its most similar candidates
            first (earlier entry first on a tie) and stops at the first that no longer fits.
        gate: told the entry [B, Hkv, E] each candidate would join, which ones may, [B, Hkv, E] bool.
        absorb: who is not similar enough joins all the same, without moving the key.
    """
    similarity, choice = nearest(entries.k, dropped, kept, kept_used & open_kept)
    possible = dropped_used & similarity.isfinite()
    joins = possible & (similarity >= threshold)
    if gate is not None:
        joins &= gate(kept.gather(-1, choice))
    moves = joins if absorb else None
    joins = possible if absorb else joins
    return gather_groups(entries, kept, dropped, choice, joins, similarity, max_votes=max_votes, moves=moves)


def gather_groups(
    entries: Entries,
    kept: Tensor,
    dropped: Tensor,
    choice: Tensor,
    joins: Tensor,
    similarity: Tensor,
    *,
    max_votes: int | None = None,
    moves: Tensor | None = None,
) -> Groups:
    """Groups from the retained slot each candidate has chosen.

    Args:
        entries: all entries, [B, Hkv, N].
        kept: [B, Hkv, M] retained entries as indices into N.
        dropped: [B, Hkv, E] candidates as indices into N.
        choice: [B, Hkv, E] int64 into M; it counts where ``joins`` [B, Hkv, E] is set.
        similarity: [B, Hkv, E], the order in which a target with too little room takes its candidates.
        max_votes: see :func:`group_by_similarity`; None for no limit.
        moves: [B, Hkv, E] bool, candidates that move the key; None for all.
    """
    batch, heads, slots = entries.tokens.shape
    rows, most = batch * heads, kept.shape[-1]
    row = torch.arange(rows, device=kept.device).reshape(batch, heads, 1)
    target, similarity = (choice + row * most)[joins], similarity[joins]
    member = (dropped + row * slots)[joins]
    size = entries.tokens.reshape(-1).long()
    own = (kept + row * slots).reshape(-1)
    room = (torch.iinfo(torch.int32).max if max_votes is None else max_votes) - size.index_select(0, own)
    asked = torch.zeros_like(room).index_add_(0, target, size.index_select(0, member))

    # Only where a target is asked for more than it has room for, the order of its candidates matters.
    crowded = (asked > room).index_select(0, target).nonzero().flatten()
    crowded = crowded[similarity.index_select(0, crowded).argsort(descending=True, stable=True)]
    crowded = crowded[target.index_select(0, crowded).argsort(stable=True)]
    at = target.index_select(0, crowded)
    wanted = size.index_select(0, member.index_select(0, crowded))
    running = wanted.cumsum(0)
    first = torch.searchsorted(at, at)  # the first candidate of the same target
    running -= (running - wanted).index_select(0, first)
    stays = torch.ones_like(target, dtype=torch.bool)
    stays[crowded] = running <= room.index_select(0, at)
    member, target = member[stays], target[stays]
    follows = torch.ones_like(stays) if moves is None else moves[joins]

    merged = torch.zeros(rows * most, dtype=torch.bool, device=kept.device).index_fill_(0, target, True)
    targets = merged.nonzero().flatten()
    is_own = torch.arange(len(targets) + len(member), device=kept.device) < len(targets)
    follows = torch.cat([torch.ones_like(targets, dtype=torch.bool), follows[stays]])
    member = torch.cat([own[merged], member])
    target, order = torch.cat([targets, target]).sort(stable=True)
    return Groups(
        member[order],
        target,
        merged.reshape(batch, heads, most),
        own=is_own[order],
        moves=None if moves is None else follows[order],
    )


def cluster_scores(entries: Entries, score: Tensor, open_: Tensor, merges: Tensor, *, threshold: float) -> Tensor:
    """Scores after merging first: an entry's becomes that of all who would merge into it, theirs -inf.

    Every open entry would merge into the most similar open one of higher score, and on to where that one goes, if
    their cosine is at least ``threshold``; of these only the ``merges`` [B, Hkv] most similar of a row.

    Args:
        score: [B, Hkv, N], higher is better, the earlier entry on a tie.
        open_: [B, Hkv, N] bool, entries that take part.
    """
    batch, heads, slots, dim = entries.k.shape
    rows = batch * heads
    unit = torch.nn.functional.normalize(entries.k.to(working_dtype(entries.k)), dim=-1, eps=1e-6)
    unit = unit.reshape(rows, slots, dim)
    order = score.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(slots, device=order.device).expand_as(order))
    rank, free = rank.reshape(rows, 1, slots), open_.reshape(rows, 1, slots)
    best, parent = [], []
    for start in range(0, slots, max(1, SIMILARITIES // (rows * slots))):
        part = slice(start, start + max(1, SIMILARITIES // (rows * slots)))
        dots = torch.bmm(unit[:, part], unit.transpose(1, 2))
        dots.masked_fill_(~free | (rank >= rank[:, :, part].transpose(1, 2)), -torch.inf)
        most, index = dots.max(-1)
        best.append(most)
        parent.append(index)
    best = torch.cat(best, 1).masked_fill(~open_.reshape(rows, slots), -torch.inf)
    best = best.masked_fill(best < threshold, -torch.inf)
    place = torch.arange(slots, device=order.device).expand(rows, -1)
    order = best.argsort(dim=-1, descending=True, stable=True)
    closest = torch.empty_like(order).scatter_(-1, order, place)
    goes = (closest < merges.reshape(rows, 1)) & ~best.isneginf()
    root = torch.where(goes, torch.cat(parent, 1), place)
    for _ in range(slots.bit_length()):
        root = root.gather(-1, root)
    flat = score.reshape(rows, slots)
    summed = torch.zeros_like(flat).scatter_add(-1, root, flat.masked_fill(~open_.reshape(rows, slots), 0))
    summed = torch.where(open_.reshape(rows, slots), summed, flat)
    return summed.masked_fill(goes, -torch.inf).reshape(score.shape)


def segment_sum(x: Tensor, target: Tensor, count: int) -> Tensor:
    """Sum rows of ``x`` [T, ...] by ``target`` [T] into [count, ...]."""
    return x.new_zeros(count, *x.shape[1:]).index_add_(0, target, x)


def segment_logsumexp(x: Tensor, target: Tensor, count: int) -> Tensor:
    """Log of the summed exponentials of ``x`` [T] by ``target``; -inf for an empty segment."""
    peak = x.new_full((count,), -torch.inf).scatter_reduce(0, target, x, "amax")
    peak = peak.masked_fill(peak.isneginf(), 0)
    return segment_sum((x - peak.index_select(0, target)).exp(), target, count).log() + peak
