"""A prompt as prefix | context | question, of which only the context is compressed (GraceKV's accounting).

Prefix and question entries stay exact and are not charged to the budget; the context's recent window stays exact as
the policy says, and is charged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.budget import Budget
from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.score import compact
from kvpass.policies.base import Policy


@dataclass(frozen=True)
class Regions:
    """How many positions at either end of a prompt are free."""

    prefix: int = 0
    question: int = 0

    def __post_init__(self) -> None:
        if self.prefix < 0 or self.question < 0:
            raise ValueError(f"a region cannot have {min(self.prefix, self.question)} tokens")

    def context(self, length: int) -> int:
        """Tokens between the free ends of a prompt of ``length`` tokens.

        Raises:
            ValueError: there are none.
        """
        middle = length - self.prefix - self.question
        if middle < 1:
            raise ValueError(
                f"a prompt of {length} tokens has no context between a prefix of {self.prefix} and a question of "
                f"{self.question} tokens"
            )
        return middle


def split(entries: Entries, regions: Regions, lengths: Sequence[int]) -> tuple[Entries, Entries, Entries]:
    """``(prefix, context, question)`` of one layer by position; ``lengths`` [B] are tokens of each sequence.

    An entry that stands for several tokens goes where its representative position lies.
    """
    lengths = [regions.context(int(n)) + regions.prefix for n in lengths]
    ends = torch.tensor(lengths, device=entries.pos.device).view(-1, 1, 1)
    front = entries.valid & (entries.pos < regions.prefix)
    back = entries.valid & (entries.pos >= ends)
    return tuple(_only(entries, mask) for mask in (front, entries.valid & ~front & ~back, back))


def join(*parts: Entries) -> Entries:
    """Regions side by side again, in order. Unused slots may then lie inside a row, which packing removes."""
    names = Entries.__dataclass_fields__
    return Entries(**{name: torch.cat([getattr(part, name) for part in parts], 2) for name in names})


def compress_context(
    policy: Policy,
    layers: Sequence[tuple[Entries, Observation]],
    budget: Budget,
    lengths: Sequence[int],
    regions: Regions,
) -> Iterator[Entries]:
    """As :meth:`Policy.compress`, with a free prefix and question; the budget refers to the context's tokens.

    The queries stay those of the whole prompt: what the question asks for may decide what stays.
    """
    if regions == Regions():
        yield from policy.compress(layers, budget, lengths)
        return
    parts = [split(entries, regions, lengths) for entries, _ in layers]
    middle = [(part[1], seen) for part, (_, seen) in zip(parts, layers, strict=True)]
    contexts = [regions.context(int(n)) for n in lengths]
    for (front, _, back), kept in zip(parts, policy.compress(middle, budget, contexts), strict=True):
        yield join(front, kept, back)


def _only(entries: Entries, mask: Tensor) -> Entries:
    return entries.take(*compact(mask))
