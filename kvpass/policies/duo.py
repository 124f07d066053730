"""Retrieval heads keep everything, streaming heads sinks and recent tokens (DuoAttention, arXiv 2410.10819)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.score import working_dtype
from kvpass.policies.base import Policy
from kvpass.policies.expected import upright
from kvpass.policies.reference import spread


@dataclass(frozen=True)
class DuoAttention(Policy):
    """As many whole rows as the budget holds, by retrieval score; the others stream.

    The published gates are trained. Without training, as in kvpress, a head is told by its mean un-rotated query
    and key over the text: attention of that query to that key at each of ``span`` positions before it, and the mean
    of its running sum. Little means that what is near gets most: a streaming head. Measured on the prompt itself, on
    ``references`` of its queries; where keys do not turn with position all heads score alike and earlier rows stay
    whole.

    A streaming row has ``sinks`` + ``recent`` entries, and at most ``share`` of the even split, of which a fifth is
    sinks: at small budgets there would be no whole row left. Entries beyond whole rows go to the next best row.
    Streaming rows grow while decoding, unless a decode budget is set.
    """

    window: int = 1
    sinks: int = 64
    recent: int = 256
    share: float = 0.5
    references: int = 512
    span: int = 500

    name: ClassVar[str] = "duo"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent < 1 or self.references < 1 or self.span < 1 or not 0 <= self.share <= 1:
            raise ValueError(
                f"recent, references and span must be >= 1 and share in [0, 1], got recent={self.recent} "
                f"references={self.references} span={self.span} share={self.share}"
            )
        if self.allocator != "uniform":
            raise ValueError(f"duo splits rows itself, got allocator={self.allocator!r}")

    def observe(self, length: int) -> Tensor:
        return spread(length, self.references, 1)

    def score(self, entries: Entries, seen: Observation) -> Tensor:
        """By position; :meth:`select` adds the sinks, which depend on the quota."""
        return entries.pos.float().masked_fill(~entries.valid, -torch.inf)

    def select(self, score: Tensor, quota: Tensor) -> Tensor:
        valid = ~score.isneginf()
        sinks = (quota // 5).clamp(max=self.sinks).unsqueeze(-1)
        return super().select(score.masked_fill(valid & (valid.cumsum(-1) <= sinks), torch.inf), quota)

    def quotas(
        self, layers: Sequence[tuple[Entries, Observation]], scores: Sequence[Tensor], totals: Sequence[int]
    ) -> list[Tensor]:
        even = self.allocate(scores, totals)
        widths = [split.shape[1] for split in even]
        even = torch.cat(even, 1)
        available = torch.cat([(~score.isneginf()).sum(-1) for score in scores], 1)
        head = torch.cat([self.retrieval(*layers[i]) for i in range(len(layers))], 1)
        least = (even * self.share).long().clamp(min=1, max=self.sinks + self.recent)
        least = torch.minimum(least, even)
        # In the order of their scores rows are filled up until the total is spent.
        order = head.argsort(dim=-1, descending=True, stable=True)
        room = (available - least).gather(-1, order)
        before = room.cumsum(-1) - room
        more = torch.minimum((even.sum(-1) - least.sum(-1))[:, None] - before, room).clamp(min=0)
        return list(least.scatter_add(-1, order, more).split(widths, 1))

    def retrieval(self, entries: Entries, seen: Observation) -> Tensor:
        """[B, Hkv] in (0, 1]: how far from the end the attention of the mean query to the mean key lies."""
        batch, heads, _, dim = entries.k.shape
        dtype = working_dtype(entries.k)
        k, valid = entries.k.to(dtype), entries.valid.unsqueeze(-1)
        if seen.frame is not None:
            k = seen.frame.turn(k, -entries.pos.clamp(min=0))
        key = (k * valid).sum(2) / valid.sum(2).clamp(min=1)
        used = (seen.q_pos >= 0).to(dtype)[:, None, :, None]
        query = (upright(seen).q.to(dtype) * used).sum(2) / used.sum(2).clamp(min=1)
        keys = key.unsqueeze(2).expand(-1, -1, self.span, -1)
        query = query.unsqueeze(2)
        if seen.frame is not None:
            at = torch.arange(self.span, device=k.device)
            keys, query = seen.frame.turn(keys, at), seen.frame.turn(query, at[-1:])
        weight = (seen.scale * query.reshape(batch, heads, -1, dim) @ keys.transpose(2, 3)).softmax(-1)
        return weight.cumsum(-1).mean(-1).mean(-1)
