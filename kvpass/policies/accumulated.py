"""What policies share that are judged by the attention accumulated over the whole prompt (H2O's column sums)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.budget import Budget
from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.score import attention_mass
from kvpass.policies.base import Policy


@dataclass(frozen=True)
class EveryQuery(Policy):
    """Every query of the prompt judges, each seeing what precedes it."""

    field_free: ClassVar[tuple[str, ...]] = ("mass",)

    def observe(self, length: int) -> int:
        return length

    def mass(self, entries: Entries, seen: Observation) -> Tensor:
        """[B, Hkv, N] fp32: softmax mass summed over queries and the group's heads, 0 for unused slots."""
        return attention_mass(entries, seen, causal=True).float()


@dataclass(frozen=True)
class Accumulated(EveryQuery):
    """How a row's quota is spent is :meth:`build`'s choice, all rows of the model being shared out first."""

    prompt_only: ClassVar[tuple[str, ...]] = ()

    def score(self, entries: Entries, seen: Observation) -> Tensor:
        return _newest_first(entries, self.mass(entries, seen))

    def compress(
        self, layers: Sequence[tuple[Entries, Observation]], budget: Budget, lengths: Sequence[int]
    ) -> Iterator[Entries]:
        rows = sum(entries.k.shape[1] for entries, _ in layers)
        totals = budget.total(lengths, rows)
        mass = [self.mass(*layers[i]) for i in range(len(layers))]
        scores = [_newest_first(layers[i][0], mass[i]) for i in range(len(layers))]
        for i, quota in enumerate(self.allocate(scores, totals)):
            yield self.build(i, layers[i][0], mass[i], quota)

    @abstractmethod
    def build(self, layer: int, entries: Entries, mass: Tensor, quota: Tensor) -> Entries:
        """What layer number ``layer`` stores, from its :meth:`mass` and its ``quota`` [B, Hkv] of entries."""

    def heavy_and_recent(self, entries: Entries, mass: Tensor, quota: Tensor, recent: Tensor) -> Tensor:
        """[B, Hkv, N] bool: sinks, the last ``recent`` [B, Hkv] positions, and the heaviest others up to ``quota``."""
        return self.select(self.pin(entries, mass, recent.clamp(min=1).unsqueeze(-1)), quota)


def _newest_first(entries: Entries, mass: Tensor) -> Tensor:
    """``mass`` with +inf for the newest entry of each row, so that every row keeps one, and -inf where unused."""
    newest = entries.valid & (entries.pos == entries.pos.amax(-1, keepdim=True))
    return mass.masked_fill(~entries.valid, -torch.inf).masked_fill_(newest, torch.inf)
