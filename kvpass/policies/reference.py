"""Keep what queries from all over the context attend to (key choice of Attention Matching, arXiv
2602.16284)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.score import Block, attention_blocks, attention_rms, last_mass, one_head_each
from kvpass.policies.base import Policy
from kvpass.policies.snapkv import SnapKV

QUESTION = 32  # last prompt queries that count as the question


def spread(length: int, references: int, window: int, recency: float = 1.0) -> Tensor:
    """Sorted unique int64 positions: ``references`` spread over the prompt, and its last ``window``.

    Their density grows with the position to the power ``recency - 1``; 1 spreads them evenly.
    """
    part = torch.linspace(0, 1, min(references, length), dtype=torch.float64)
    at = (part.pow(1 / recency) * (length - 1)).round().long()
    return torch.cat([at, torch.arange(max(0, length - window), length)]).unique()


@dataclass(frozen=True)
class Reference(Policy):
    """Root mean square softmax weight over reference queries, each of which scores every entry."""

    references: int = 400
    recency: float = 1.0  # how far they crowd towards the end, see :func:`spread`
    # Weight of what the prompt's last queries ask for, beside what the references do: a question stands at the end.
    asked: float = 0.0
    round_robin: bool = False  # one query head of a group at each position, in turn, instead of all of them

    name: ClassVar[str] = "reference"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.references < 1:
            raise ValueError(f"references must be >= 1, got {self.references}")
        if self.recency < 1:
            raise ValueError(f"recency must be >= 1, got {self.recency}")

    def observe(self, length: int) -> Tensor:
        last = max(self.window, QUESTION) if self.asked else self.window
        return spread(length, self.references, last, self.recency)

    def blend(self, entries: Entries, seen: Observation, rms: Tensor, blocks: Iterable[Block]) -> Tensor:
        """Shares of the references' weight plus ``asked`` times shares of the last queries' mass.

        ``blocks`` are the attention of ``seen``, as :meth:`asking` gives it.
        """
        if not self.asked:
            return rms
        last = SnapKV(window=QUESTION, sinks=self.sinks).pooled(entries, last_mass(entries, seen, blocks, QUESTION))
        return _shares(rms) + self.asked * _shares(last)

    def asking(self, entries: Entries, seen: Observation) -> Observation:
        """The queries that score."""
        return one_head_each(seen, entries.k.shape[1]) if self.round_robin else seen

    def score(self, entries: Entries, seen: Observation) -> Tensor:
        seen = self.asking(entries, seen)
        blocks = list(attention_blocks(entries, seen, causal=False))
        rms = attention_rms(entries, seen, blocks=blocks)
        return self.pin(entries, self.blend(entries, seen, rms, blocks))


def _shares(weight: Tensor) -> Tensor:
    return weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
