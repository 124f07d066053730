"""One global budget for coverage and resolution over trees of prototypes (GraceKV, arXiv 2608.07001)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvpass.budget import Budget, even_split
from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.prototype import MULTIPLICITIES, Multiplicity
from kvpass.policies.base import Policy
from kvpass.policies.grace_build import Market, Shape, frontier, stored
from kvpass.policies.grace_context import DEPTHS, alone, depths, read
from kvpass.policies.reference import spread


@dataclass(frozen=True)
class GraceKV(Policy):
    """Stores the frontier of a tree of prototypes over each slot of the context, chosen by one auction.

    An entry goes where it removes most expected error of attention over all layers, heads and slots: to a slot that
    nothing covers yet, or to a prototype that is worth splitting, down to single tokens, which stay as they are.
    Sinks and the recent window stay exact and are charged. The prompt's last ``question`` queries ask; a hop follows
    the observed query nearest after a token, as only ``references`` positions are observed.
    """

    question: int = 32  # last queries, which judge relevance and distortion
    references: int = 256  # positions whose queries are observed besides, for hops and probes
    multiplicity: Multiplicity = "coherence"
    key_frame: Literal["unrotated", "cached"] = "unrotated"
    hops: int = 2
    hop_share: float = 0.3  # lam_graph: of relevance, what is reached by hops
    reserved: float = 0.6  # alpha: most of the budget that tokens which must stay exact may claim
    candidates: int = 4  # sharpest turns at which an interval may be split, besides its middle
    # Parts that can be switched off to see what they are worth.
    curved: bool = True  # slots and splits follow the curvature of hidden states; else even slots
    tree: bool = True  # nodes split step by step; else a slot is one prototype or its single tokens
    across: bool = True  # one auction over all rows; else one per row with an even share
    weigh_heads: bool = True  # by how much a head's output can move the hidden state

    name: ClassVar[str] = "gracekv"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.multiplicity not in MULTIPLICITIES:
            raise ValueError(f"multiplicity must be one of {', '.join(MULTIPLICITIES)}, got {self.multiplicity!r}")
        if self.key_frame not in ("unrotated", "cached"):
            raise ValueError(f"key_frame must be unrotated or cached, got {self.key_frame!r}")
        if self.question < 1 or self.references < 1 or self.hops < 0 or self.candidates < 0:
            raise ValueError("question and references must be >= 1, hops and candidates >= 0")
        for field in ("hop_share", "reserved"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"{field} must be in [0, 1], got {getattr(self, field)}")

    def observe(self, length: int) -> Tensor:
        return spread(length, self.references, max(self.window, self.question))

    def taps(self, layers: int) -> tuple[int, ...]:
        return depths(layers, DEPTHS) if self.curved else ()

    def score(self, entries: Entries, seen: Observation) -> Tensor:
        """Sinks and window only: what else is kept is not a matter of one score per entry."""
        return self.pin(entries, torch.zeros_like(entries.log_votes))

    def compress(
        self, layers: Sequence[tuple[Entries, Observation]], budget: Budget, lengths: Sequence[int]
    ) -> Iterator[Entries]:
        rows = sum(entries.k.shape[1] for entries, _ in layers)
        totals = budget.total(lengths, rows)
        plans = []
        for b, total in enumerate(totals):
            plans.append(self._plan([alone(*layers[i], b) for i in range(len(layers))], total))
        for i in range(len(layers)):
            parts = [stored(plan, alone(*layers[i], b), i) for b, plan in enumerate(plans)]
            yield joined(parts)

    def _plan(self, layers: list[tuple[Entries, Observation]], total: int) -> Market | list[Tensor]:
        """The frontier of one sequence; or, where there is nothing to buy, which entries of each layer stay."""
        counts = torch.cat([entries.lengths for entries, _ in layers], 1)
        if total >= int(counts.sum()):
            return [entries.valid[0] for entries, _ in layers]
        quota = total // counts.shape[1]
        window = max(min(4, self.window), min(self.window, quota // 4))
        exact = [self.pinned(entries, window)[0] for entries, _ in layers]
        left = total - sum(int(kept.sum()) for kept in exact)
        if left <= 0 or not layers[0][1].q.shape[2]:
            split = even_split(torch.tensor([total], device=counts.device), counts)
            quotas = split.split([entries.k.shape[1] for entries, _ in layers], 1)
            return [
                self.select(self.score(entries, seen), own)[0]
                for (entries, seen), own in zip(layers, quotas, strict=True)
            ]
        context = read(
            layers,
            exact,
            question=self.question,
            hop_count=self.hops,
            hop_share=self.hop_share,
            curved=self.curved,
            weigh_heads=self.weigh_heads,
        )
        shape = Shape(
            multiplicity=self.multiplicity,
            unrotated=self.key_frame == "unrotated",
            reserved=self.reserved,
            candidates=self.candidates,
            tree=self.tree,
            across=self.across,
        )
        return frontier(context, left, shape)


def joined(parts: list[Entries]) -> Entries:
    """Sequences [1, H, N_b] side by side, padded to the longest row."""
    longest = max(part.k.shape[2] for part in parts)
    blank = {"log_votes": -torch.inf, "pos": -1}
    fields = {}
    for name in vars(parts[0]):
        padded = []
        for part in parts:
            x = getattr(part, name)
            room = list(x.shape)
            room[2] = longest - x.shape[2]
            padded.append(torch.cat([x, x.new_full(room, blank.get(name, 0))], 2) if room[2] else x)
        fields[name] = torch.cat(padded) if len(padded) > 1 else padded[0]
    return Entries(**fields)
