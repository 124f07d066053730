"""Keep what the true continuation attends to: what eviction could reach if it knew the future."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.score import attention_mass
from kvpass.policies.base import Policy
from kvpass.policies.rehearsal import with_own


@dataclass(frozen=True)
class Oracle(Policy):
    """Softmax mass from the queries of the tokens that follow the prompt, as the full cache made them.

    Only an evaluation knows them. Heads of a layer compete without a floor.
    """

    window: int = 1
    sinks: int = 0
    allocator: str = "layer"
    floor: float = 0.0

    name: ClassVar[str] = "oracle"
    wants: ClassVar[str] = "continuation"

    def score(self, entries: Entries, seen: Observation) -> Tensor:
        mass = attention_mass(with_own(entries, seen), seen, causal=True)
        return self.pin(entries, mass[..., : entries.k.shape[2]])
