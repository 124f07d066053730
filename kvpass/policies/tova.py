"""Keep what the last query attends to, the same tokens for every head of a layer (TOVA, arXiv 2401.06104)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.score import attention_mass, recent_queries
from kvpass.policies.base import Policy


@dataclass(frozen=True)
class TOVA(Policy):
    """Softmax weight of the newest token's query, averaged over all heads of the layer.

    Differs from the published method in cutting once after the prompt, not at every token, and in never dropping
    the newest token. Heads of a layer differ by at most the one entry that an uneven budget leaves over.
    """

    window: int = 1
    sinks: int = 0

    name: ClassVar[str] = "tova"

    def score(self, entries: Entries, seen: Observation) -> Tensor:
        mass = attention_mass(entries, recent_queries(seen, 1), causal=True)
        return self.pin(entries, over_heads(entries, mass))


def over_heads(entries: Entries, weight: Tensor) -> Tensor:
    """``weight`` [B, Hkv, N] averaged over the heads of a layer that hold an entry of the same position."""
    batch, heads, _ = weight.shape
    at = entries.pos.long().clamp(min=0)
    flat = at.reshape(batch, -1)
    held = entries.valid.to(weight.dtype)
    sums = weight.new_zeros(2, batch, int(at.max()) + 1 if at.numel() else 0)
    sums[0].scatter_add_(1, flat, (weight * held).reshape(batch, -1))
    sums[1].scatter_add_(1, flat, held.reshape(batch, -1))
    mean = sums[0] / sums[1].clamp(min=1)
    return mean.unsqueeze(1).expand(-1, heads, -1).gather(-1, at)
