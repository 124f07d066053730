"""Keep entries at random: what every other policy has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.kernels.entries import Entries, Observation
from kvpass.policies.base import Policy


@dataclass(frozen=True)
class Random(Policy):
    """Entries drawn by ``seed``, layer, KV head and position, so a sequence draws the same in any batch.

    Nothing is protected but the newest token.
    """

    window: int = 1
    sinks: int = 0
    seed: int = 0

    name: ClassVar[str] = "random"

    def observe(self, length: int) -> int:
        return 0

    def scores(self, layers: Sequence[tuple[Entries, Observation]]) -> list[Tensor]:
        return [self.pin(layers[i][0], _draw(layers[i][0].pos, self.seed, i)) for i in range(len(layers))]

    def score(self, entries: Entries, seen: Observation) -> Tensor:
        return self.pin(entries, _draw(entries.pos, self.seed, 0))


def _draw(pos: Tensor, seed: int, layer: int) -> Tensor:
    """[B, Hkv, N] fp32 in [0, 1): a mixed hash of each entry's coordinates (multiply and shift, 64 bits wrapping)."""
    head = torch.arange(pos.shape[1], device=pos.device).view(1, -1, 1)
    start = (seed * 0x2545F4914F6CDD1D + layer * 0x1D8E4E27C47D124F) % (1 << 62)
    x = pos.long() + (head << 32) + start
    for factor in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
        x = (x ^ (x >> 31)) * factor
    return ((x >> 24) & 0xFFFFFF).float() / (1 << 24)
