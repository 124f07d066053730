"""Heavy hitters and recent tokens, half and half (H2O, arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.kernels.entries import Entries, Observation
from kvpass.policies.accumulated import EveryQuery


@dataclass(frozen=True)
class H2O(EveryQuery):
    """Causal softmax mass received from every query of the prompt, summed over queries and the group's heads.

    Half of a row's quota (the odd entry too) is its newest tokens, the rest its heaviest others; no sinks by rule.
    O(L²) time, a block of queries at a time, and it keeps every query of the prompt until the compression. Differs
    from the published code in choosing per KV head, and once after the prompt: what a decode budget compresses is
    judged by the last ``window`` queries, as evicted scores are not carried along.
    """

    sinks: int = 0
    recent: float = 0.5  # share of a row's quota

    name: ClassVar[str] = "h2o"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.recent <= 1:
            raise ValueError(f"recent is a share in [0, 1], got {self.recent}")

    def score(self, entries: Entries, seen: Observation) -> Tensor:
        return self.pin(entries, self.mass(entries, seen), 1)

    def select(self, score: Tensor, quota: Tensor) -> Tensor:
        valid = ~score.isneginf()
        newest = valid.sum(-1, keepdim=True) - valid.cumsum(-1)  # tokens after this one: rows are in order
        recent = (quota * self.recent).ceil().long().unsqueeze(-1)
        return super().select(score.masked_fill(valid & (newest < recent), torch.inf), quota)
