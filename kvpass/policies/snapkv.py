"""Keep what the last prompt queries attend to (SnapKV, arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import max_pool1d

from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.score import attention_mass, recent_queries
from kvpass.policies.base import Policy


@dataclass(frozen=True)
class SnapKV(Policy):
    """Softmax mass of the last ``window`` queries, summed over the group's heads, max-pooled along the row.

    Keeps ``sinks`` besides the window, which the paper leaves to the scores. ``allocator="layer"`` is
    Ada-SnapKV.
    """

    pool: int = 7  # width of the pooling, odd

    name: ClassVar[str] = "snapkv"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"pool must be odd and positive, got {self.pool}")

    def score(self, entries: Entries, seen: Observation) -> Tensor:
        return self.pin(entries, self.asked(entries, seen))

    def asked(self, entries: Entries, seen: Observation) -> Tensor:
        """[B, Hkv, N]: the pooled mass, 0 for pinned entries."""
        return self.pooled(entries, attention_mass(entries, recent_queries(seen, self.window), causal=True))

    def pooled(self, entries: Entries, mass: Tensor) -> Tensor:
        """``mass`` [B, Hkv, N] of entries that compete, max-pooled along the row."""
        # Pooling must not carry the window's own mass onto its neighbours: the paper drops it first.
        mass = mass.masked_fill(self.pinned(entries), 0)
        return max_pool1d(mass, self.pool, stride=1, padding=self.pool // 2)
