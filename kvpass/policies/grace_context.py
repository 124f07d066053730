"""What GraceKV reads from one sequence's prefill: slots, relevance, head sensitivity and distortion probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.flow import hops, relevance, shares
from kvpass.kernels.score import compact, working_dtype
from kvpass.kernels.slots import curvature, robust, segment, unit

DEPTHS = (0.33, 0.50, 0.67)  # of the layers whose states show where the text turns
HOP_DEPTHS = (0.50, 0.75)  # of the layers whose attention is followed
SLOTS = 8  # slots with most relevance, which send two probes each
TARGET = 64  # entries of a slot


def depths(layers: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Layer indices at these shares of the depth."""
    return tuple(sorted({min(int(share * layers), layers - 1) for share in shares}))


@dataclass(frozen=True)
class Context:
    """One sequence's compressible entries and all it tells about them. A row is a (layer, KV head)."""

    layers: Sequence[tuple[Entries, Observation]]  # of this sequence alone, with every entry
    exact: list[Tensor]  # per layer [H, N] bool, entries that stay as they are
    edges: Tensor  # [J + 1] int64 positions between slots
    turns: Tensor  # [T] fp64 curvature at each position
    relevance: Tensor  # [rows, T] fp32, by position
    sensitivity: Tensor  # [rows] fp64, mean 1
    probes: Tensor  # [P] int64 slots of the observed queries that judge


def open_entries(entries: Entries, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Indices [H, M] of one sequence's compressible entries in order, and which of them are used."""
    return compact(entries.valid[0] & ~exact)


def alone(entries: Entries, seen: Observation, b: int) -> tuple[Entries, Observation]:
    """Sequence ``b`` without the padding of its queries and hidden states."""
    own = Entries(*(getattr(entries, name)[b : b + 1] for name in vars(entries)))
    used = seen.q_pos[b] >= 0
    only = replace(seen, q=seen.q[b : b + 1], q_pos=seen.q_pos[b : b + 1])
    if not used.all():
        only = replace(seen, q=only.q[:, :, used], q_pos=only.q_pos[:, used])
    if seen.hidden is not None:
        real = seen.hidden_pos[b] >= 0
        only = replace(only, hidden=seen.hidden[b : b + 1, real], hidden_pos=seen.hidden_pos[b : b + 1, real])
    return own, only


def attention(entries: Entries, seen: Observation, slot: Tensor) -> Tensor:
    """[H, G * U, N] causal softmax weights of the observed queries ``slot`` [U] of one sequence, head-major."""
    heads = entries.k.shape[1]
    dtype = working_dtype(entries.k)
    q = seen.q[0][:, slot].to(dtype) * seen.scale
    group = q.shape[0] // heads
    logits = torch.bmm(q.reshape(heads, group * len(slot), -1), entries.k[0].to(dtype).transpose(1, 2))
    logits += entries.log_votes[0].to(dtype).unsqueeze(1)
    late = entries.pos[0].unsqueeze(1) > seen.q_pos[0, slot].repeat(group)[None, :, None]
    return logits.masked_fill_(late, -torch.inf).softmax(-1).nan_to_num_(0.0)


def read(
    layers: Sequence[tuple[Entries, Observation]],
    exact: list[Tensor],
    *,
    question: int,
    hop_count: int,
    hop_share: float,
    curved: bool,
    weigh_heads: bool,
) -> Context:
    """Everything but the trees. ``question`` is how many of the last observed queries ask."""
    tokens = int(max(entries.pos.max() for entries, _ in layers)) + 1
    asking = torch.arange(max(0, layers[0][1].q.shape[2] - question), layers[0][1].q.shape[2])
    direct, static, flowing = [], [], []
    for (entries, seen), kept in zip(layers, exact, strict=True):
        weight = attention(entries, seen, asking)
        direct.append(_by_position(weight.sum(1).masked_fill(kept, 0), entries, tokens))
        if weigh_heads and seen.out is not None:
            heads = entries.k.shape[1]
            out = seen.out.to(weight.dtype).reshape(heads, -1, seen.out.shape[-1])  # [H, G * Dv, E]
            group = seen.q.shape[1] // heads
            said = torch.bmm(weight, entries.v[0].to(weight.dtype))
            said = said.reshape(heads, group, len(asking), -1).transpose(1, 2).flatten(2)
            static.append(out.square().sum((1, 2)).sqrt())
            flowing.append(torch.bmm(said, out).norm(dim=-1).mean(-1))
        else:
            static.append(direct[-1].new_ones(entries.k.shape[1]))
            flowing.append(static[-1])
    direct = shares(torch.cat(direct))
    follow = depths(len(layers), HOP_DEPTHS)

    def ask(at: Tensor, weights: Tensor) -> Tensor:
        total = direct.new_zeros(tokens)
        for index in follow:
            entries, seen = layers[index]
            slot = nearest_after(seen.q_pos[0], at)
            group = seen.q.shape[1] // entries.k.shape[1]
            weight = attention(entries, seen, slot).mul_(weights.repeat(group).to(direct)[None, :, None]).sum(1)
            total += _by_position(weight.masked_fill(exact[index], 0), entries, tokens).sum(0)
        return total

    indirect = hops(shares(direct.mean(0)), ask, hop_count) if hop_count and len(asking) else direct.new_zeros(tokens)
    flow = relevance(direct, indirect, hop_share)
    sensitivity = (torch.cat(static) * torch.cat(flowing)).double().sqrt()
    sensitivity = sensitivity / sensitivity.mean() if sensitivity.sum() > 0 else torch.ones_like(sensitivity)
    edges, turns = _slots(layers, exact, tokens, curved)
    return Context(layers, exact, edges, turns, flow, sensitivity, _probes(layers[0][1], flow, edges, question))


def nearest_after(q_pos: Tensor, at: Tensor) -> Tensor:
    """Slots of the first observed queries [W] (ascending) that see the positions ``at``; the last where none does."""
    return torch.searchsorted(q_pos.long().contiguous(), at.contiguous()).clamp(max=len(q_pos) - 1)


def _by_position(x: Tensor, entries: Entries, tokens: int) -> Tensor:
    """``x`` [H, N] of entries as [H, T] by position."""
    at = entries.pos[0].long()
    return x.new_zeros(x.shape[0], tokens).scatter_add_(1, at.clamp(min=0), x.masked_fill(at < 0, 0))


def _slots(layers, exact: list[Tensor], tokens: int, curved: bool) -> tuple[Tensor, Tensor]:
    """Edges of the slots over the compressible positions, and the curvature at every position."""
    inside = [entries.pos[0][entries.valid[0] & ~kept] for (entries, _), kept in zip(layers, exact, strict=True)]
    inside = [pos for pos in inside if pos.numel()]
    start, stop = min(int(pos.min()) for pos in inside), max(int(pos.max()) for pos in inside) + 1
    count = max(1, round((stop - start) / TARGET))
    even = torch.linspace(start, stop, count + 1, dtype=torch.float64).round().long()
    states = _states(layers, tokens) if curved else None
    if states is None:
        return even, torch.zeros(tokens, dtype=torch.float64)
    states = unit(states)
    turns = curvature(states)
    return start + segment(states[:, start:stop], robust(turns)[start:stop]), turns


def _states(layers, tokens: int) -> Tensor | None:
    """[L, T, E] hidden states at the sampled depths; without them the keys of those layers, side by side over heads.

    None where they do not cover every position, as when part of the cache was compressed before.
    """
    found = []
    for index in depths(len(layers), DEPTHS):
        entries, seen = layers[index]
        if seen.hidden is not None and _from_start(seen.hidden_pos[0], tokens):
            found.append(seen.hidden[0, :tokens])
        elif bool((entries.valid[0].sum(-1) == tokens).all()):
            k = entries.k[0][entries.valid[0]].reshape(entries.k.shape[1], tokens, -1)
            if seen.frame is not None:
                k = seen.frame.turn(k, -torch.arange(tokens, device=k.device))
            found.append(k.transpose(0, 1).flatten(1))
        else:
            return None
    return torch.stack(found)


def _from_start(pos: Tensor, tokens: int) -> bool:
    """Whether columns 0 .. tokens - 1 stand at those positions."""
    return pos.shape[0] >= tokens and torch.equal(pos[:tokens].long(), torch.arange(tokens, device=pos.device))


def _probes(seen: Observation, flow: Tensor, edges: Tensor, question: int) -> Tensor:
    """The question's queries, and of each of the most relevant slots those nearest its end and its best token."""
    total = flow.sum(0)
    sums = torch.cat([total.new_zeros(1), total.cumsum(0)])
    worth = sums[edges[1:]] - sums[edges[:-1]]
    best = worth.argsort(descending=True, stable=True)[:SLOTS]
    at = [edges[best + 1] - 1]
    at.append(torch.stack([edges[j] + total[edges[j] : edges[j + 1]].argmax() for j in best.tolist()]))
    width = seen.q.shape[2]
    last = torch.arange(max(0, width - question), width)
    return torch.cat([last, nearest_after(seen.q_pos[0], torch.cat(at))])
