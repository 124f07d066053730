"""Rows sized by how well their head retrieves, SnapKV's choice inside (HeadKV, arXiv 2410.19258)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.score import attention_blocks
from kvpass.policies.allocate import fit
from kvpass.policies.rehearsal import held_tokens, last_queries, one, with_own
from kvpass.policies.snapkv import SnapKV


@dataclass(frozen=True)
class HeadKV(SnapKV):
    """Nearly the whole budget is one pool of the model, shared out in proportion to each head's retrieval score.

    The published scores come from needle prompts that are run once for a model. Here they are measured on the prompt
    itself: ``needles`` spans of ``span`` tokens, spread over it, are repeated after it. A query of a span scores a
    head by the weight on those of its ``span`` most attended tokens that lie in the span's original, over ``span``.
    With ``c`` the average beside sinks and window, a row gets ``c - c // beta`` and its share of a pool of
    ``c // beta`` a row; what rows cannot hold and what rounding leaves goes to the others evenly. Query heads of a
    group are averaged.
    """

    beta: float = 1.01
    needles: int = 16
    span: int = 16

    name: ClassVar[str] = "headkv"
    wants: ClassVar[str] = "rehearsal"
    prompt_only: ClassVar[tuple[str, ...]] = ("scores", "retrieval")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1 or self.needles < 1 or self.span < 1:
            raise ValueError(
                f"beta, needles and span must be >= 1, got beta={self.beta} needles={self.needles} span={self.span}"
            )
        if self.allocator != "uniform":
            raise ValueError(f"headkv allocates by head itself, got allocator={self.allocator!r}")

    def rehearsal(self, ids: Tensor) -> Tensor:
        ids = torch.as_tensor(ids, dtype=torch.int64)
        starts, span = self._spans(len(ids))
        return torch.cat([ids[start : start + span] for start in starts])

    def score(self, entries: Entries, seen: Observation) -> Tensor:
        late = torch.full_like(seen.q_pos[:, :1], torch.iinfo(torch.int32).max)
        if seen.q_pos.numel():
            late = seen.q_pos.amax(-1, keepdim=True) + 1
        count = late.new_tensor([self._count(length) for length in held_tokens(entries)])[:, None]
        prompt = seen.q_pos.masked_fill(seen.q_pos >= late - count, -1)
        return super().score(entries, Observation(seen.q, prompt, seen.scale))

    def quotas(
        self, layers: Sequence[tuple[Entries, Observation]], scores: Sequence[Tensor], totals: Sequence[int]
    ) -> list[Tensor]:
        widths = [score.shape[1] for score in scores]
        even = torch.cat(self.allocate(scores, totals), 1)
        available = torch.cat([(~score.isneginf()).sum(-1) for score in scores], 1)
        pinned = torch.cat([score.isposinf().sum(-1) for score in scores], 1)
        head = torch.cat([self.retrieval(*layers[i]) for i in range(len(layers))], 1).double()
        share = head / head.sum(-1, keepdim=True)
        share = torch.where(share.isfinite(), share, 1 / sum(widths))  # nobody retrieves
        total = even.sum(-1)
        average = (total // sum(widths) - pinned.amax(-1))[:, None]
        pool = (average / self.beta).floor()
        wanted = pinned + (share * pool * sum(widths) + average - pool).round().long()
        split = torch.where(average < 1, even, fit(wanted, total, available))
        return list(split.split(widths, 1))

    def retrieval(self, entries: Entries, seen: Observation) -> Tensor:
        """[B, Hkv]: mean score of the repeated spans."""
        lengths = held_tokens(entries)
        return torch.stack([self._found(*one(entries, seen, b), length) for b, length in enumerate(lengths)])

    def _found(self, entries: Entries, seen: Observation, length: int) -> Tensor:
        starts, span = self._spans(length)
        _, asking = last_queries(seen, self._count(length))
        everything = with_own(entries, asking)
        begin = int(entries.pos.masked_fill(~entries.valid, 1 << 30).min())
        group = asking.q.shape[1] // entries.k.shape[1]
        first = torch.tensor(starts, device=entries.pos.device).repeat_interleave(span).repeat(group) + begin
        found = entries.k.new_zeros(entries.k.shape[1], dtype=torch.float64)
        for block in attention_blocks(everything, asking, causal=True):
            weight, index = (block.mass / block.total.unsqueeze(1)).topk(min(span, block.mass.shape[1]), dim=1)
            at = everything.pos[0].gather(1, index.flatten(1)).view_as(index)
            inside = (at >= first[block.at]) & (at < first[block.at] + span)
            found += (weight * inside).sum((1, 2))
        return found / (span * len(first))

    def _spans(self, length: int) -> tuple[list[int], int]:
        """Where the repeated spans start, and their length: shorter in a prompt that does not hold them all."""
        span = max(1, min(self.span, length // self.needles))
        starts = torch.linspace(0, length - span, min(self.needles, length), dtype=torch.float64)
        return starts.round().long().tolist(), span

    def _count(self, length: int) -> int:
        starts, span = self._spans(length)
        return len(starts) * span
