"""Prototypes of intervals of a row, and how far attention goes wrong with them (GraceKV, arXiv 2608.07001, Eq. 6-8,
24-31).

Intervals are lists ``row``, ``start``, ``stop`` (int64 [n]) over the entries of one layer, [R, N]. Work goes by
length: intervals of up to 1, 2, 4, ... entries are gathered together, so what is alive stays small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from kvpass.kernels import cpu
from kvpass.kernels.entries import Observation
from kvpass.kernels.score import exp_, working_dtype

Multiplicity = Literal["coherence", "votes", "calibrated"]
MULTIPLICITIES: tuple[str, ...] = get_args(Multiplicity)
GATHERED = 1 << 22  # numbers gathered at once
BASE = 0.1  # share of the mean relevance that every entry's value weighs at least
MASS, OUTPUT = 0.25, 0.75  # how much the errors of the softmax mass and of its product with the values count
EXCESS = 2.0  # nats a calibrated log-vote may exceed ln(votes) by
TINY = 1e-12
TOP = 60.0  # largest exponent of a prototype's mass relative to the probe's largest


@dataclass(frozen=True)
class Layer:
    """What prototypes of one layer are made from and judged by."""

    k: Tensor  # [R, N, D] working dtype, in the frame that is averaged in
    size: Tensor  # [R, N] length of each key
    v: Tensor  # [R, N, Dv]
    log_votes: Tensor  # [R, N], -inf = unused
    pos: Tensor  # [R, N] int64
    relevance: Tensor  # [R, N]
    probes: Tensor  # [R, P, D] queries times the logit scale
    seen: Tensor  # [R, P] int64, how many entries of the row each probe sees
    peak: Tensor  # [R, P] largest visible logit
    mass: Tensor  # [R, N, P] exp(logit - peak), 0 where unseen
    total: Tensor  # [R, P] sum of mass; 1 for a probe that sees nothing
    turning: Observation | None  # whose frame the keys were un-rotated from; None = cached frame
    multiplicity: Multiplicity
    fit: Tensor | None  # [P] bool, probes that calibrate; the others judge. None: all do both
    native: list[Tensor] | None = None  # the same for the C++ kernel, where it can be used

    @property
    def attended(self) -> Tensor:
        """[R, N] mean share of attention over the probes."""
        return torch.bmm(self.mass, (1 / self.total).unsqueeze(-1)).squeeze(-1) / max(1, self.total.shape[1])


def layer(
    k: Tensor,
    v: Tensor,
    log_votes: Tensor,
    pos: Tensor,
    relevance: Tensor,
    probes: Tensor,
    probe_pos: Tensor,
    seen: Observation,
    *,
    multiplicity: Multiplicity,
    unrotated: bool,
) -> Layer:
    """Entries [R, N] and probes [R, P, D] at ``probe_pos`` [R, P] (-1 = unused) of one layer, prepared."""
    dtype = working_dtype(k)
    k, v, probes = k.to(dtype), v.to(dtype), probes.to(dtype) * seen.scale
    pos = pos.long()
    valid = log_votes > -torch.inf
    sees = valid.unsqueeze(-1) & (pos.unsqueeze(-1) <= probe_pos.unsqueeze(1))
    logits = torch.bmm(k, probes.transpose(1, 2)) + log_votes.to(dtype).unsqueeze(-1)
    logits.masked_fill_(~sees, -torch.inf)
    peak = logits.amax(1, keepdim=True) if k.shape[1] else logits.new_full((k.shape[0], 1, probes.shape[1]), -torch.inf)
    blind = peak.isneginf()
    mass = exp_(logits.sub_(peak.masked_fill(blind, torch.inf)))
    total = mass.sum(1)
    turning = seen if unrotated and seen.frame is not None else None
    flat = turning.frame.turn(k, -pos.clamp(min=0)) if turning else k
    judges = torch.arange(probes.shape[1], device=k.device) % 2 == 0
    of = Layer(
        k=flat,
        size=flat.norm(dim=-1),
        v=v,
        log_votes=log_votes.to(dtype),
        pos=pos,
        relevance=relevance.to(dtype),
        probes=probes,
        seen=sees.sum(1),
        peak=peak.masked_fill(blind, 0).squeeze(1),
        mass=mass,
        total=total.masked_fill(blind.squeeze(1), 1),
        turning=turning,
        multiplicity=multiplicity,
        fit=judges if multiplicity == "calibrated" and probes.shape[1] > 1 else None,
    )
    return native(of, seen)


@dataclass(frozen=True)
class Prototypes:
    """Stored form of n intervals. One entry's prototype is that entry."""

    k: Tensor  # [n, D] as stored, after rotation
    v: Tensor  # [n, Dv]
    log_votes: Tensor  # [n]
    pos: Tensor  # [n] int64
    mass: Tensor  # [n, P] attention mass of the members
    output: Tensor | None  # [n, P, Dv] mass times values


def prototypes(of: Layer, row: Tensor, start: Tensor, stop: Tensor, *, outputs: bool = False) -> Prototypes:
    """Prototypes of n intervals of at least one entry.

    The key is the mean key at the mean position, the value the mean weighted by relevance (a tenth of it evenly), the
    log-vote ln(votes * coherence^2) with coherence the length of the mean key over the mean length, within
    [1, votes]; or ln(votes); or the least-squares one over the probes that see the interval.
    """
    count = len(row)
    slots, width = of.k.shape[1:]
    k = of.k.new_zeros(count, width)
    v = of.v.new_zeros(count, of.v.shape[-1])
    size, votes = k.new_zeros(count), k.new_zeros(count)
    pos = torch.zeros(count, dtype=torch.float64, device=k.device)
    mass = of.mass.new_zeros(count, of.mass.shape[-1])
    output = of.mass.new_zeros(count, of.mass.shape[-1], of.v.shape[-1]) if outputs else None
    for which, index, used in _buckets(row, start, stop, slots, _width(of, outputs)):
        number = used.sum(-1, keepdim=True).to(k.dtype)
        even = used.to(k.dtype) / number
        k[which] = torch.bmm(even.unsqueeze(1), of.k.reshape(-1, width)[index]).squeeze(1)
        size[which] = (of.size.reshape(-1)[index] * even).sum(-1)
        votes[which] = (of.log_votes.reshape(-1)[index].exp() * used).sum(-1)
        pos[which] = (of.pos.reshape(-1)[index] * used).sum(-1).double() / number.squeeze(-1)
        weight = of.relevance.reshape(-1)[index] * used
        weight = (weight + BASE * (weight * even).sum(-1, keepdim=True) + 1e-30) * used
        values = of.v.reshape(-1, of.v.shape[-1])[index]
        v[which] = torch.bmm(weight.unsqueeze(1), values).squeeze(1) / weight.sum(-1, keepdim=True)
        own = of.mass.reshape(-1, mass.shape[-1])[index] * used.unsqueeze(-1)
        mass[which] = own.sum(1)
        if outputs:
            output[which] = torch.bmm(own.transpose(1, 2), values)
    pos = pos.round().long()
    coherence = k.norm(dim=-1) / (size + 1e-6)
    if of.turning is not None:
        k = of.turning.frame.turn(k, pos)
    log_votes = votes.log()
    if of.multiplicity == "coherence":
        log_votes = (log_votes + 2 * coherence.log()).clamp(min=0).minimum(log_votes)
    made = Prototypes(k, v, log_votes, pos, mass, output)
    return replace(made, log_votes=_calibrated(of, made, row, stop)) if of.multiplicity == "calibrated" else made


def distortion(of: Layer, row: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """[n] fp64: mean over the probes that see all of an interval of its share of attention times the relative errors
    that its prototype makes. 0 for single entries."""
    if of.native is not None:
        return split_costs(of, row, start, stop, stop.unsqueeze(-1), stop.unsqueeze(-1))[:, 0]
    result = torch.zeros(len(row), dtype=torch.float64, device=row.device)
    several = (stop - start > 1).nonzero().flatten()
    probes, value = of.mass.shape[-1], of.v.shape[-1]
    block = max(1, GATHERED // max(1, probes * value))
    for part in several.split(block):
        result[part] = _distortion(of, row[part], start[part], stop[part])
    return result


def split_costs(of: Layer, row: Tensor, start: Tensor, stop: Tensor, ends: Tensor, begins: Tensor) -> Tensor:
    """[n, 2 K] fp64: the distortion of start .. ``ends`` [n, K], then that of ``begins`` [n, K] .. stop.

    A part outside its interval is cut short, an empty one costs nothing.
    """
    low, high = start.unsqueeze(-1), stop.unsqueeze(-1)
    ends, begins = ends.clamp(low, high), begins.clamp(low, high)
    if of.native is not None:
        cost = torch.empty(len(row), 2 * ends.shape[1], dtype=torch.float64)
        cpu.split_costs(
            [*of.native, *(x.contiguous() for x in (row, start, stop, ends, begins))],
            cost,
            of.multiplicity == "coherence",
        )
        return cost
    rows = row.unsqueeze(-1).expand(-1, 2 * ends.shape[1])
    left = torch.cat([low.expand_as(ends), begins], 1)
    right = torch.cat([ends, high.expand_as(begins)], 1)
    return distortion(of, rows.flatten(), left.flatten(), right.flatten()).reshape(rows.shape)


def native(of: Layer, seen: Observation) -> Layer:
    """``of`` with what the C++ version of :func:`split_costs` reads, where it can be used."""
    fits = of.k.device.type == "cpu" and of.k.dtype == torch.float32 and of.multiplicity != "calibrated"
    if not fits or not cpu.available():
        return of
    if of.turning is None:
        pairs = torch.zeros(0, dtype=torch.int64)
        turn = [pairs, pairs, of.k.new_zeros(0), of.k.new_zeros(0)]
    else:
        frame = seen.frame
        angle = torch.arange(int(of.pos.max()) + 1, dtype=torch.float64).unsqueeze(-1) * frame.freq
        turn = [frame.first, frame.second, angle.cos().float(), angle.sin().float()]
    votes = of.log_votes.exp()
    parts = [of.k, of.size, of.v, votes, of.relevance, of.probes, of.peak, of.mass, of.total, of.pos, of.seen, *turn]
    return replace(of, native=[x.contiguous() for x in parts])


def drop_distortion(of: Layer, row: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """[n] fp64: the same for leaving the interval out, which is its mean share of attention."""
    sums = torch.cat([of.mass.new_zeros(of.mass.shape[0], 1, of.mass.shape[2]), of.mass.cumsum(1)], 1)
    judges = _judges(of, row, stop)
    share = (sums[row, stop] - sums[row, start]) / of.total[row]
    return _mean(share, judges)


def _distortion(of: Layer, row: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    made = prototypes(of, row, start, stop, outputs=True)
    own = (_logits(of, made.k, row) + made.log_votes.unsqueeze(-1) - of.peak[row]).clamp(max=TOP).exp()
    wrong = MASS * (made.mass - own).square() / (made.mass.square() + TINY)
    off = torch.addcmul(made.output, own.unsqueeze(-1), made.v.unsqueeze(1), value=-1)
    wrong += OUTPUT * off.square().sum(-1) / (made.output.square().sum(-1) + TINY)
    return _mean(made.mass / of.total[row] * wrong, _judges(of, row, stop))


def _judges(of: Layer, row: Tensor, stop: Tensor) -> Tensor:
    sees = of.seen[row] >= stop.unsqueeze(-1)
    return sees if of.fit is None else sees & ~of.fit


def _mean(x: Tensor, counted: Tensor) -> Tensor:
    return (x * counted).sum(-1).double() / counted.sum(-1).clamp(min=1)


def _calibrated(of: Layer, made: Prototypes, row: Tensor, stop: Tensor) -> Tensor:
    """The log-vote with the least squared error of relative mass over the probes set aside for it."""
    sees = of.seen[row] >= stop.unsqueeze(-1)
    if of.fit is not None:
        sees = sees & of.fit
    own = (_logits(of, made.k, row) - of.peak[row]).clamp(max=TOP).exp()
    weight = sees / of.total[row].square()
    fitted = ((weight * made.mass * own).sum(-1) / (weight * own.square()).sum(-1)).log()
    fitted = torch.where(fitted.isfinite(), fitted, made.log_votes)
    return fitted.clamp(min=0).minimum(made.log_votes + EXCESS)


def _logits(of: Layer, k: Tensor, row: Tensor) -> Tensor:
    """[n, P] logits of the probes of each key's row."""
    result = k.new_empty(len(row), of.probes.shape[1])
    for one in row.unique().tolist():
        own = row == one
        result[own] = k[own] @ of.probes[one].T
    return result


def _width(of: Layer, outputs: bool) -> int:
    return of.k.shape[-1] + of.v.shape[-1] + of.mass.shape[-1]


def _buckets(
    row: Tensor, start: Tensor, stop: Tensor, slots: int, width: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Intervals of similar length: their places [m], flat member indices [m, L] and which of those are theirs."""
    length = stop - start
    bucket = torch.ceil(torch.log2(length.double())).long()
    for power in bucket.unique().tolist():
        places = (bucket == power).nonzero().flatten()
        step = torch.arange(int(length[places].max()), device=row.device)
        for which in places.split(max(1, GATHERED // (len(step) * width))):
            used = step < length[which].unsqueeze(-1)
            index = (row[which] * slots + start[which]).unsqueeze(-1) + step.where(used, 0)
            yield which, index, used
