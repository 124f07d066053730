"""What a compression policy is: who stays, how many per row, and what the kept entries become."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.budget import Budget
from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.score import compact
from kvpass.policies.allocate import ALLOCATORS


@dataclass(frozen=True)
class Policy(ABC):
    """Selection (:meth:`score`), allocation (:meth:`allocate`) and representation (:meth:`represent`).

    A batch is treated sequence by sequence: each keeps what it would keep alone. Ties go to the earlier
    entry.
    """

    window: int = 32  # last prompt tokens: their queries judge, their entries stay exact
    sinks: int = 4  # first entries of a row, which stay exact
    allocator: str = "uniform"  # uniform | layer | blend | global
    floor: float = 0.2  # share of the even split that every row keeps, or by which blend evens rows out

    name: ClassVar[str]
    wants: ClassVar[str] = "prompt"  # whose queries judge: the prompt's | a rehearsal's | the continuation's
    # Methods whose result does not depend on the budget: an evaluation at several budgets runs them once.
    prompt_only: ClassVar[tuple[str, ...]] = ("scores",)
    # Those that besides read no field: it runs them once for all policies that have the same method.
    field_free: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if self.window < 1 or self.sinks < 0:
            raise ValueError(f"window must be >= 1 and sinks >= 0, got window={self.window} sinks={self.sinks}")
        if self.allocator not in ALLOCATORS:
            raise ValueError(f"allocator must be one of {', '.join(ALLOCATORS)}, got {self.allocator!r}")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be in [0, 1], got {self.floor}")

    def observe(self, length: int) -> int | Tensor:
        """Queries of a prompt of ``length`` tokens it wants to see: the last so many, or sorted positions."""
        return self.window

    @property
    def recall(self) -> int | None:
        """Of the decoded tokens it judges by the queries of the last so many; None: of all since the last time."""
        return self.window

    @property
    def asks_again(self) -> bool:
        """Whether rows rebuilt from the full keys are judged by queries from all over the text, as a prompt is, and not
        by the recalled ones alone."""
        return self.wants == "prompt"

    @property
    def needs_frames(self) -> bool:
        """Whether it cannot do without :attr:`Observation.frame` in layers whose keys turn."""
        return False

    def taps(self, layers: int) -> tuple[int, ...]:
        """Which of the model's ``layers`` full-attention layers it wants the hidden states of."""
        return ()

    def rehearsal(self, ids: Tensor) -> Tensor:
        """[R] int64, at least one: token ids to run over the full cache after the prompt ``ids`` [L].

        They run on a copy of which nothing stays; their queries are observed as the last R, beside those of
        :meth:`observe`. Only a policy that ``wants`` a rehearsal is asked.
        """
        raise NotImplementedError(f"policy {self.name} rehearses nothing")

    @abstractmethod
    def score(self, entries: Entries, seen: Observation) -> Tensor:
        """[B, Hkv, N] fp32, the higher stays; +inf for sinks and the recent window, -inf for unused slots."""

    def scores(self, layers: Sequence[tuple[Entries, Observation]]) -> list[Tensor]:
        """:meth:`score` of every layer, in order."""
        return [self.score(*layers[i]) for i in range(len(layers))]

    def allocate(self, scores: Sequence[Tensor], totals: Sequence[int]) -> list[Tensor]:
        """Entries per row, [B, Hkv] int64 a layer; sequence b sums to ``min(totals[b], its entries)``."""
        return ALLOCATORS[self.allocator](scores, totals, floor=self.floor)

    def quotas(
        self, layers: Sequence[tuple[Entries, Observation]], scores: Sequence[Tensor], totals: Sequence[int]
    ) -> list[Tensor]:
        """As :meth:`allocate`, for policies that judge whole rows by their entries and not by the scores alone."""
        return self.allocate(scores, totals)

    def represent(self, entries: Entries, seen: Observation, keep: Tensor) -> Entries:
        """What is stored for ``keep`` [B, Hkv, N] bool: kept entries by position, padded."""
        return entries.take(*compact(keep))

    def pinned(self, entries: Entries, window: int | Tensor | None = None) -> Tensor:
        """[B, Hkv, N] bool: the first ``sinks`` entries of each row and those in its last ``window`` positions.

        ``window`` is a number, one per sequence ([B, 1, 1]), or this policy's own.
        """
        valid = entries.valid
        order = valid.cumsum(-1)
        last = entries.pos.masked_fill(~valid, -1).amax(-1, keepdim=True)
        return valid & ((order <= self.sinks) | (entries.pos > last - (self.window if window is None else window)))

    def pin(self, entries: Entries, score: Tensor, window: int | Tensor | None = None) -> Tensor:
        """``score`` with +inf where :meth:`pinned` and -inf where a slot is unused."""
        score = score.float().masked_fill(~entries.valid, -torch.inf)
        return score.masked_fill_(self.pinned(entries, window), torch.inf)

    def select(self, score: Tensor, quota: Tensor) -> Tensor:
        """[B, Hkv, N] bool: the ``quota`` [B, Hkv] best entries of each row.

        Where a quota does not hold sinks and window, the window shrinks first, from its old end down to the
        newest token; then the sinks go, latest first.
        """
        order = score.argsort(dim=-1, descending=True, stable=True)
        place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
        rank = torch.empty_like(order).scatter_(-1, order, place)
        forced = score.isposinf()
        count = forced.sum(-1, keepdim=True)
        newest = rank == count - 1
        sink = ~newest & (rank < self.sinks)
        shrunk = torch.where(
            newest, 0, torch.where(sink, rank + 1, (count - 1).clamp(max=self.sinks) + count - 1 - rank)
        )
        rank = torch.where(forced, shrunk, rank)
        return (rank < quota.unsqueeze(-1)) & ~score.isneginf()

    def compress(
        self, layers: Sequence[tuple[Entries, Observation]], budget: Budget, lengths: Sequence[int]
    ) -> Iterator[Entries]:
        """Compress the layers of one model together, yielding them in order as they are done.

        Args:
            layers: entries and observed queries of each compressible layer. Indexed, so a sequence that
                releases a layer once it has been yielded keeps memory flat.
            budget: what may be kept over all rows of a sequence.
            lengths: tokens of each sequence, which a fractional budget refers to.
        """
        rows = sum(entries.k.shape[1] for entries, _ in layers)
        totals = budget.total(lengths, rows)
        scores = self.scores(layers)
        for i, quota in enumerate(self.quotas(layers, scores, totals)):
            keep = self.select(scores[i], quota)
            yield self.represent(*layers[i], keep)
