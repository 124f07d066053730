"""How much attention observed queries pay to cache entries.

Softmax rows are computed for a block of queries at a time and laid out [rows, N, queries]: what follows
gathers and sums whole entries, which is then contiguous. Arithmetic is fp32 whatever the storage dtype;
fp64 stays fp64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvpass.kernels import cpu, triton
from kvpass.kernels.entries import Entries, Observation

BLOCK = 1 << 20  # logits alive at once: what the second-level cache holds is several times faster
LANES = 16  # blocks are a multiple of this many queries wide, where reductions over entries vectorise


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype numerics run in for storage ``x``: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def exp_(x: Tensor) -> Tensor:
    """Exponentials of ``x`` <= 0 in place; in fp32 those whose square is subnormal, many times slower to
    compute with, become 0."""
    x.exp_()
    return x if x.dtype == torch.float64 else torch.nn.functional.threshold_(x, 1e-18, 0.0)


def compact(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where ``mask`` [..., N] is set, in order: ``index`` int64 and ``used`` bool, [..., most set in a
    row]."""
    count = mask.sum(-1)
    most = int(count.max()) if count.numel() else 0
    slot = torch.where(mask, mask.cumsum(-1) - 1, most)
    source = torch.arange(mask.shape[-1], device=mask.device).expand_as(slot)
    index = torch.zeros(*mask.shape[:-1], most + 1, dtype=torch.int64, device=mask.device)
    index = index.scatter_(-1, slot, source)[..., :most]
    used = torch.arange(most, device=mask.device) < count.unsqueeze(-1)
    return index, used


def recent_queries(seen: Observation, window: int) -> Observation:
    """Queries of the last ``window`` positions of each sequence, by position, unused slots first."""
    held = min(window, seen.q_pos.shape[-1])
    pos, index = seen.q_pos.topk(held, dim=-1)
    pos, index = pos.flip(-1), index.flip(-1)
    last = seen.q_pos.amax(-1, keepdim=True) if held else pos
    q = seen.q.gather(2, index[:, None, :, None].expand(-1, seen.q.shape[1], -1, seen.q.shape[-1]))
    return replace(seen, q=q, q_pos=torch.where(pos > last - window, pos, -1))


def one_head_each(seen: Observation, kv_heads: int) -> Observation:
    """One query a position and KV head: a sequence's used slots go round the heads of the group in turn.

    The result has one query head per KV head, and unused slots at its end up to a multiple of ``LANES``.
    Neighbouring positions ask much the same, so this spends a group's worth of rows on as many positions
    instead.
    """
    batch, heads, width, dim = seen.q.shape
    group = heads // kv_heads
    turn = ((seen.q_pos >= 0).cumsum(-1) - 1).clamp(min=0) % group
    q = seen.q.reshape(batch, kv_heads, group, width, dim)
    turn = turn[:, None, None, :, None].expand(-1, kv_heads, 1, -1, dim)
    spare = -width % LANES
    q = torch.nn.functional.pad(q.gather(2, turn).squeeze(2), (0, 0, 0, spare))
    return replace(seen, q=q, q_pos=torch.nn.functional.pad(seen.q_pos, (0, spare), value=-1))


def grouped_queries(seen: Observation, kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries of each KV head's group side by side.

    Returns ``q`` [B*Hkv, G*W, Dk] multiplied by the logit scale and ``pos`` [B*Hkv, G*W]; head-major, so
    query ``g*W + w`` is head ``g`` of the group at window slot ``w``.
    """
    batch, heads, width, dim = seen.q.shape
    group = heads // kv_heads
    q = seen.q.to(dtype).reshape(batch * kv_heads, group * width, dim) * seen.scale
    return q, grouped_positions(seen, kv_heads)


def grouped_positions(seen: Observation, kv_heads: int) -> Tensor:
    """``pos`` of :func:`grouped_queries` alone."""
    batch, heads, width, _ = seen.q.shape
    pos = seen.q_pos[:, None, None].expand(-1, kv_heads, heads // kv_heads, -1)
    return pos.reshape(batch * kv_heads, heads // kv_heads * width)


@dataclass(frozen=True)
class Block:
    """Attention of some queries over every entry. Softmax weights are ``mass / total``.

    The logits are scale * q . k + log-vote. A query that is unused or sees nothing has mass 0 everywhere.
    """

    at: slice  # which of the grouped queries
    mass: Tensor  # [B*Hkv, N, r] exponentials relative to the query's largest logit, 0 where invisible; or a first part
    total: Tensor  # [B*Hkv, r] their sum over N; 1 for a query without mass
    log_z: Tensor  # [B*Hkv, r] log of the softmax denominator; +inf for a query without mass


def attention_blocks(entries: Entries, seen: Observation, *, causal: bool, narrow: bool = False) -> Iterator[Block]:
    """Softmax of the observed queries over all entries (log-votes included), a block of queries at a time.

    With ``causal`` a query sees entries up to its own position; without, every valid entry. With ``narrow`` too, a
    block's mass ends at the last entry that any of its queries sees: half the work where every query judges.
    """
    batch, kv_heads, slots, dim = entries.k.shape
    dtype = working_dtype(entries.k)
    rows = batch * kv_heads
    k = entries.k.to(dtype).reshape(rows, slots, dim)
    votes = entries.log_votes.to(dtype).reshape(rows, slots, 1)
    voted = bool(votes.any())
    pos = entries.pos.reshape(rows, slots, 1)
    reach = pos.flatten(1).cummax(1).values.amin(0) if causal and narrow and slots else None
    q, q_pos = grouped_queries(seen, kv_heads, dtype)
    width = max(1, BLOCK // max(1, rows * slots))
    width = width // LANES * LANES or width
    for start in range(0, q.shape[1], width):
        at = slice(start, min(start + width, q.shape[1]))
        turned = q[:, at].transpose(1, 2)
        count = slots if reach is None else max(1, int((reach <= q_pos[:, at].max()).sum()))
        held = k[:, :count]
        mass = torch.baddbmm(votes[:, :count], held, turned) if voted else torch.bmm(held, turned)
        if mass.shape[-1] % LANES == 0 and pos.dtype == torch.int32 and cpu.supports_weights(mass):
            hidden = pos[:, :count].squeeze(-1) if causal else None
            yield Block(at, mass, *cpu.softmax(mass, hidden, q_pos[:, at]))
            continue
        if causal:
            mass.masked_fill_(pos[:, :count] > q_pos[:, None, at], -torch.inf)
        peak = mass.amax(1, keepdim=True)
        blind = peak.isneginf() | (q_pos[:, None, at] < 0)
        mass = exp_(mass.sub_(peak.masked_fill(blind, torch.inf)))
        total = mass.sum(1, keepdim=True)
        log_z = (peak + total.log()).masked_fill(blind, torch.inf)
        yield Block(at, mass, total.masked_fill(blind, 1).squeeze(1), log_z.squeeze(1))


def attention_mass(entries: Entries, seen: Observation, *, causal: bool = True, per_head: bool = False) -> Tensor:
    """Softmax weight each entry receives, summed over the observed queries.

    Returns [B, Hkv, N] summed over the group's heads, or [B, Hkv, G, N] with ``per_head``; fp32 (fp64 for
    fp64 keys). Unused entries receive 0.
    """
    if triton.supports_mass(entries.k, seen.q):
        mass = triton.attention_mass(
            entries.k, entries.log_votes, entries.pos, seen.q, seen.q_pos, seen.scale, causal
        )  # fmt: skip
        return mass if per_head else mass.sum(2)
    batch, kv_heads, slots, _ = entries.k.shape
    group = seen.q.shape[1] // kv_heads
    width = seen.q.shape[2]
    mass = entries.k.new_zeros(batch * kv_heads, slots, group, dtype=working_dtype(entries.k))
    head = torch.eye(group, dtype=mass.dtype, device=mass.device).repeat_interleave(width, 0)
    for block in attention_blocks(entries, seen, causal=causal, narrow=True):
        mass[:, : block.mass.shape[1]].baddbmm_(block.mass, head[block.at] / block.total.unsqueeze(-1))
    mass = mass.reshape(batch, kv_heads, slots, group).transpose(2, 3)
    return mass if per_head else mass.sum(2)


def last_mass(entries: Entries, seen: Observation, blocks: Iterable[Block], last: int) -> Tensor:
    """[B, Hkv, N]: softmax weight each entry receives from the queries of the last ``last`` positions in ``blocks``."""
    batch, kv_heads, slots, _ = entries.k.shape
    pos = grouped_positions(seen, kv_heads)
    chosen = (pos >= 0) & (pos > pos.amax(-1, keepdim=True) - last)
    total = entries.k.new_zeros(batch * kv_heads, slots, 1, dtype=working_dtype(entries.k))
    for block in blocks:
        if chosen[:, block.at].any():
            total.baddbmm_(block.mass, (chosen[:, block.at] / block.total).unsqueeze(-1))
    return total.reshape(batch, kv_heads, slots)


def attention_rms(
    entries: Entries, seen: Observation, *, causal: bool = False, blocks: Iterable[Block] | None = None
) -> Tensor:
    """[B, Hkv, N]: root mean square softmax weight of each entry over the group's observed queries.

    The key score of Attention Matching (arXiv 2602.16284), "highest attention keys". Unused queries do not
    count. ``blocks`` are the attention of these queries where it is already there.
    """
    batch, kv_heads, slots, _ = entries.k.shape
    total = entries.k.new_zeros(batch * kv_heads, slots, dtype=working_dtype(entries.k))
    for block in attention_blocks(entries, seen, causal=causal) if blocks is None else blocks:
        scale = block.total.square().reciprocal()
        if scale.shape[-1] % LANES == 0 and cpu.supports_weights(block.mass):
            cpu.squares(block.mass, scale, total)
            continue
        for row in range(batch * kv_heads):  # matrix times vector: batched, it is several times slower
            total[row].addmv_(block.mass[row].square(), scale[row])
    group = seen.q.shape[1] // kv_heads
    count = (seen.q_pos >= 0).sum(-1).mul(group).clamp(min=1)
    return (total.reshape(batch, kv_heads, slots) / count[:, None, None]).sqrt()
