"""Keys, votes and values chosen to reproduce what queries of the context get from it (Attention Matching, arXiv
2602.16284)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.matching import fit_votes, pursue
from kvpass.kernels.merge import fit_values
from kvpass.kernels.score import attention_blocks, attention_rms, compact, grouped_queries, working_dtype
from kvpass.policies.base import Policy
from kvpass.policies.reference import spread

Keys = Literal["attention", "omp"]
Judges = Literal["prompt", "rehearsal"]


@dataclass(frozen=True)
class AttentionMatching(Policy):
    """Original keys, each with a fitted log-vote and a fitted value; sinks and the recent window stay exact.

    The judges are ``references`` queries spread over the prompt and those of its last ``window`` tokens (the
    paper's context-prefill), or with ``judges="rehearsal"`` so many of a repetition of the prompt after itself (its
    repeat-prefill, without an instruction, as a policy has no tokenizer). Each sees every entry, and a group's heads
    are judged together.

    ``keys="attention"`` keeps the entries with the highest root mean square weight; ``"omp"`` those that explain the
    softmax denominator best, found in ``rounds``. Log-votes are the least-squares fit of the denominator, values the
    ridge fit of the output towards the original values.

    A key with a negligible vote keeps its place at the least one, where the published code drops it, and totals
    are met exactly.
    """

    keys: Keys = "attention"
    judges: Judges = "prompt"
    references: int = 400
    rounds: int = 32
    votes: tuple[float, float] | None = None  # least and greatest log-vote; None: (-3, 3), with omp (-7, 7)
    value_fit: bool = True
    ridge: float = 1e-3

    name: ClassVar[str] = "matching"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys not in get_args(Keys):
            raise ValueError(f"keys must be one of {', '.join(get_args(Keys))}, got {self.keys!r}")
        if self.judges not in get_args(Judges):
            raise ValueError(f"judges must be one of {', '.join(get_args(Judges))}, got {self.judges!r}")
        if self.references < 1 or self.rounds < 1 or self.ridge <= 0:
            raise ValueError("references and rounds must be >= 1 and ridge > 0")
        if self.votes is not None and not self.votes[0] <= 0 <= self.votes[1]:
            raise ValueError(f"votes must be a range around 0, got {self.votes}")

    @property
    def wants(self) -> str:
        return self.judges

    def observe(self, length: int) -> int | Tensor:
        return spread(length, self.references, self.window) if self.judges == "prompt" else 0

    def rehearsal(self, ids: Tensor) -> Tensor:
        return torch.as_tensor(ids, dtype=torch.int64)

    def asking(self, entries: Entries, seen: Observation) -> Observation:
        """The judges: what was observed of the prompt, or ``references`` spread over the rehearsal."""
        return seen if self.judges == "prompt" else _thinned(entries, seen, self.references)

    def score(self, entries: Entries, seen: Observation) -> Tensor:
        return self.pin(entries, attention_rms(entries, self.asking(entries, seen), causal=False))

    def represent(self, entries: Entries, seen: Observation, keep: Tensor) -> Entries:
        short = keep.sum(-1) < entries.lengths
        if not short.any() or not seen.q.shape[2]:
            return entries.take(*compact(keep))
        seen = self.asking(entries, seen)
        blocks = list(attention_blocks(entries, seen, causal=False))
        rows, slots = keep.shape[0] * keep.shape[1], keep.shape[2]
        mass = torch.cat([b.mass for b in blocks], -1)
        log_z = torch.cat([b.log_z for b in blocks], -1)
        counts = log_z.isfinite()
        total = torch.cat([b.total for b in blocks], -1).masked_fill(~counts, 0)
        exact = (self.pinned(entries) & keep | ~short.unsqueeze(-1)).reshape(rows, slots)
        # What the exact entries already carry of the denominator is not for the others to explain.
        missing = total - torch.bmm(exact.to(mass.dtype).unsqueeze(1), mass).squeeze(1)
        low, high = self.votes or ((-3.0, 3.0) if self.keys == "attention" else (-7.0, 7.0))
        if self.keys == "omp":
            keep = self._pursued(entries, keep, exact.reshape(keep.shape), mass, missing, (low, high))
        index, used = compact(keep)
        out = entries.take(index, used)
        flat = index.reshape(rows, -1)
        free = (used.reshape(rows, -1)) & ~exact.gather(1, flat)
        most = flat.shape[1]
        own = mass.gather(1, flat.unsqueeze(-1).expand(-1, -1, mass.shape[-1])) * free.unsqueeze(-1)
        weight = fit_votes(own, missing, low=low, high=high)
        added = torch.where(free, weight.log(), 0).reshape(out.tokens.shape)
        out = replace(out, log_votes=out.log_votes + added.to(out.log_votes.dtype))
        if not self.value_fit:
            return out
        dtype = working_dtype(entries.k)
        v = entries.v.to(dtype).reshape(rows, slots, -1)
        full = torch.bmm(mass.transpose(1, 2), v) / total.masked_fill(~counts, 1).unsqueeze(-1)
        q, _ = grouped_queries(seen, keep.shape[1], dtype)
        logits = torch.bmm(out.k.to(dtype).reshape(rows, most, -1), q.transpose(1, 2))
        logits += out.log_votes.to(dtype).reshape(rows, most, 1)
        value = fit_values(logits, counts, out.v.to(dtype).reshape(rows, most, -1), full, free, ridge=self.ridge)
        return replace(out, v=value.reshape(out.v.shape).to(out.v.dtype))

    def _pursued(
        self,
        entries: Entries,
        keep: Tensor,
        exact: Tensor,
        mass: Tensor,
        missing: Tensor,
        bounds: tuple[float, float],
    ) -> Tensor:
        """[B, Hkv, N] bool: the exact entries, and as many others as ``keep`` holds, by pursuit."""
        found = exact & keep
        count = (keep & ~exact).reshape(-1, keep.shape[-1]).sum(-1).tolist()
        others = (entries.valid & ~self.pinned(entries) & ~exact).reshape(-1, keep.shape[-1])
        flat = found.reshape(others.shape)
        for row, wanted in enumerate(count):
            at = others[row].nonzero().flatten()
            if wanted:
                picked = pursue(mass[row, at], missing[row], wanted, rounds=self.rounds, low=bounds[0], high=bounds[1])
                flat[row, at[picked]] = True
        return flat.reshape(keep.shape)


def _thinned(entries: Entries, seen: Observation, count: int) -> Observation:
    """At most ``count`` of each sequence's queries from behind its last entry, evenly spread."""
    late = seen.q_pos > entries.pos.amax((1, 2))[:, None]
    index, used = compact(late)
    held = late.sum(-1, keepdim=True)
    width = min(count, index.shape[-1])
    # Of a sequence with fewer all are taken once.
    step = (held - 1).clamp(min=0) / max(1, width - 1)
    place = torch.arange(width, device=held.device)
    at = torch.where(held <= width, place, (place * step).round().long())
    at = at.clamp(max=max(0, index.shape[-1] - 1))
    slot, used = index.gather(-1, at), used.gather(-1, at)
    q = seen.q.gather(2, slot[:, None, :, None].expand(-1, seen.q.shape[1], -1, seen.q.shape[-1]))
    return Observation(q, seen.q_pos.gather(-1, slot).masked_fill(~used, -1), seen.scale)
