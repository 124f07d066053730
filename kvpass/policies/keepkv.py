"""Merge what a selector drops into what it keeps, so attention keeps its mass (KeepKV, arXiv 2504.09936)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.merge import KEY_MODES, KeyMode, group_by_similarity, merge
from kvpass.kernels.score import compact, recent_queries
from kvpass.policies.base import Policy
from kvpass.policies.reference import Reference, spread
from kvpass.policies.snapkv import SnapKV


@dataclass(frozen=True)
class KeepKV(Policy):
    """A selector's choice, plus votes for the dropped entries that resemble a kept one.

    Sinks and the recent window neither receive nor become members. Dropped entries below ``threshold`` are
    lost. A given ``selector`` brings its own window, sinks and allocator; those of this policy must be left
    alone then. Without one, keys are chosen by the queries that also weigh the members: :class:`Reference`,
    or :class:`SnapKV` when ``references`` is 0. Choosing, weighing, voting and fitting by the same queries
    is what makes merging pay.
    """

    window: int = 16  # where a row keeps some fifty entries, 32 exact ones leave the others too little room
    selector: Policy | None = None
    key_mode: KeyMode = "convex"
    # Least cosine of stored keys. The paper's 0.8 leaves most dropped entries unmerged.
    threshold: float = 0.5
    max_votes: int = 64
    excess: float = 2.0  # nats a log-vote may exceed ln(tokens) by
    references: int = 400  # queries spread over the prompt that weigh members; 0: the window's, causally
    value_fit: bool = True  # refit values to the full attention output of the same queries
    ridge: float = 1e-3

    name: ClassVar[str] = "keepkv"

    def __post_init__(self) -> None:
        chosen = self.selector
        if chosen is None:
            common = {f: getattr(self, f) for f in ("window", "sinks", "allocator", "floor")}
            chosen = Reference(**common, references=self.references) if self.references else SnapKV(**common)
            object.__setattr__(self, "selector", chosen)
        else:
            for field in ("window", "sinks"):
                own, default = getattr(self, field), getattr(KeepKV, field)
                if own not in (default, getattr(chosen, field)):
                    raise ValueError(f"{field}={own} contradicts the selector's {getattr(chosen, field)}")
                object.__setattr__(self, field, getattr(chosen, field))
            if self.allocator == "uniform":
                object.__setattr__(self, "allocator", chosen.allocator)
                object.__setattr__(self, "floor", chosen.floor)
        super().__post_init__()
        if self.key_mode not in KEY_MODES:
            raise ValueError(f"key_mode must be one of {', '.join(KEY_MODES)}, got {self.key_mode!r}")
        if not -1 <= self.threshold <= 1:
            raise ValueError(f"threshold is a cosine in [-1, 1], got {self.threshold}")
        if self.max_votes < 1 or self.references < 0 or self.ridge <= 0 or self.excess < 0:
            raise ValueError("max_votes must be >= 1, references >= 0, ridge > 0 and excess >= 0")

    def observe(self, length: int) -> int | Tensor:
        if not self.references:
            return self.selector.observe(length) or self.window
        own = spread(length, self.references, self.window)
        asked = self.selector.observe(length)
        if isinstance(asked, int):
            asked = torch.arange(max(0, length - asked), length)
        return torch.cat([own, asked]).unique()

    def score(self, entries: Entries, seen: Observation) -> Tensor:
        return self.selector.score(entries, seen)

    def represent(self, entries: Entries, seen: Observation, keep: Tensor) -> Entries:
        kept, kept_used = compact(keep)
        middle = entries.valid & ~self.pinned(entries)
        open_kept = middle.gather(-1, kept) & kept_used
        dropped, dropped_used = compact(middle & ~keep)
        if not dropped.shape[-1] or not seen.q.shape[2]:
            return entries.take(kept, kept_used)
        groups = group_by_similarity(
            entries,
            kept,
            kept_used,
            open_kept,
            dropped,
            dropped_used,
            threshold=self.threshold,
            max_votes=self.max_votes,
        )
        return merge(
            entries,
            seen if self.references else recent_queries(seen, self.window),
            kept,
            kept_used,
            groups,
            key_mode=self.key_mode,
            causal=not self.references,
            excess=self.excess,
            value_fit=self.value_fit,
            ridge=self.ridge,
            open_kept=open_kept,
        )
