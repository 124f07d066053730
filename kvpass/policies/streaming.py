"""Attention sinks and the most recent tokens (StreamingLLM, arXiv 2309.17453), original positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvpass.kernels.entries import Entries, Observation
from kvpass.policies.base import Policy


@dataclass(frozen=True)
class Streaming(Policy):
    """Keeps the first ``sinks`` entries of a row and fills the rest of its quota with the newest."""

    name: ClassVar[str] = "streaming"

    def observe(self, length: int) -> int:
        return 0

    def score(self, entries: Entries, seen: Observation) -> Tensor:
        return self.pin(entries, entries.pos)
