"""Keep what repeating the context needs (KVzip, arXiv 2505.23416)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.score import attention_blocks, compact
from kvpass.policies.base import Policy
from kvpass.policies.rehearsal import held_tokens, last_queries, one, with_own


@dataclass(frozen=True)
class KVzip(Policy):
    """Largest softmax weight an entry gets while the context is repeated after it, over the group's heads and queries.

    The context is repeated in chunks of ``chunk`` tokens, each led in by ``instruction`` (token ids; none by default,
    as a policy has no tokenizer) and the last ``lead`` tokens of the chunk before. A chunk's queries are compared over
    sinks, the chunk's own entries and, causally, the repeated tokens. All rows of the model compete, without a floor.
    Sinks and the newest token stay.

    Differs from the published code in repeating all chunks in one run, where a later repetition can look at earlier
    ones, and in knowing no system prompt. Costs one more prefill, and the memory of its queries and of a second full
    cache while it lasts.
    """

    window: int = 1
    allocator: str = "global"
    floor: float = 0.0
    chunk: int = 2000
    lead: int = 8
    instruction: tuple[int, ...] = ()

    name: ClassVar[str] = "kvzip"
    wants: ClassVar[str] = "rehearsal"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1 or self.lead < 0:
            raise ValueError(f"chunk must be >= 1 and lead >= 0, got chunk={self.chunk} lead={self.lead}")

    def observe(self, length: int) -> int:
        return 0

    def rehearsal(self, ids: Tensor) -> Tensor:
        ids = torch.as_tensor(ids, dtype=torch.int64)
        told = ids.new_tensor(self.instruction)
        parts = [(told, ids[self._led(first) : last]) for first, last in self._chunks(len(ids))]
        return torch.cat([tokens for part in parts for tokens in part])

    def score(self, entries: Entries, seen: Observation) -> Tensor:
        score = torch.zeros_like(entries.log_votes)
        for b, length in enumerate(held_tokens(entries)):
            self._repeat(*one(entries, seen, b), length, score[b])
        return self.pin(entries, score)

    def _repeat(self, entries: Entries, seen: Observation, length: int, score: Tensor) -> None:
        """Write the weights of one sequence to ``score`` [Hkv, N]."""
        spans = list(self._chunks(length))
        sizes = [len(self.instruction) + last - self._led(first) for first, last in spans]
        _, asking = last_queries(seen, sum(sizes))
        begin, start = int(entries.pos.masked_fill(~entries.valid, 1 << 30).min()), int(asking.q_pos[0, 0])
        sinks = entries.valid & (entries.valid.cumsum(-1) <= self.sinks)
        at = entries.pos - begin
        for (first, last), size in zip(spans, sizes, strict=True):
            index, used = compact(entries.valid & (sinks | (at >= first) & (at < last)))
            own = (asking.q_pos[0] >= start) & (asking.q_pos[0] < start + size)
            judges = replace(asking, q=asking.q[:, :, own], q_pos=asking.q_pos[:, own])
            if seen.own_k is not None:
                own = (seen.own_pos[0] >= start) & (seen.own_pos[0] < start + size)
                judges = replace(judges, own_k=seen.own_k[:, :, own], own_pos=seen.own_pos[:, own])
            most = score.new_zeros(index.shape[1:])
            asked = with_own(entries.take(index, used), judges)
            for block in attention_blocks(asked, judges, causal=True, narrow=True):
                weight = (block.mass[:, : most.shape[-1]] / block.total.unsqueeze(1)).amax(-1)
                most = torch.maximum(most, weight.to(most.dtype))
            # An unused slot points at the row's first entry.
            score.scatter_reduce_(-1, index[0], most.masked_fill(~used[0], 0), "amax")
            start += size

    def _chunks(self, length: int) -> Iterator[tuple[int, int]]:
        for first in range(0, length, self.chunk):
            yield first, min(first + self.chunk, length)

    def _led(self, first: int) -> int:
        """Where the repetition of the chunk from ``first`` starts."""
        return max(0, first - self.lead)
