"""Merge what a selector drops into what it keeps, so attention keeps its mass (KeepKV, arXiv 2504.09936)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from kvpass.budget import Budget
from kvpass.kernels.entries import Entries, Observation, Predicted
from kvpass.kernels.gate import logit_spread, worth_merging
from kvpass.kernels.group import cluster_scores, group_by_similarity
from kvpass.kernels.merge import KEY_FRAMES, KEY_MODES, KeyFrame, KeyMode, merge
from kvpass.kernels.predict import log_mass, merged, predict, since
from kvpass.kernels.score import (
    Block,
    attention_blocks,
    attention_rms,
    compact,
    one_head_each,
    recent_queries,
)
from kvpass.policies.base import Policy
from kvpass.policies.parallel import in_order
from kvpass.policies.reference import Reference, spread
from kvpass.policies.snapkv import SnapKV
from kvpass.policies.stacking import stack, together, unstack

Gate = Literal["cos", "sigma", "cost"]
Order = Literal["evict_first", "merge_first"]
Orphan = Literal["drop", "absorb"]
Judge = Literal["recent", "last", "ema"]
STEPS = 64  # decoded steps whose queries are kept for predictions, at least twice what is between two compressions


@dataclass(frozen=True)
class KeepKV(Policy):
    """A selector's choice, plus votes for the dropped entries that resemble a kept one.

    Sinks and the recent window neither receive nor become members. Dropped entries below ``threshold`` are
    lost. A given ``selector`` brings its own window, sinks and allocator; those of this policy must be left
    alone then. Without one, keys are chosen by the queries that also weigh the members: :class:`Reference`,
    or :class:`SnapKV` when ``references`` is 0. Choosing, weighing, voting and fitting by the same queries
    is what makes merging pay.

    The heads of a group share a key, a value and one log-vote, the least-squares one. A log-vote for every query
    head would make masses exact, but it is the shared value that errs (it is the whole residual, see
    :mod:`kvpass.kernels.gate`), so the store has none; ``key_mode="min_norm"`` gets exact masses from the key.
    """

    window: int = 16  # where a row keeps some fifty entries, 32 exact ones leave the others too little room
    # Of a row's quota this share is its recent window, when that is more than ``window``: long contexts leave room.
    window_share: float = 1 / 6
    selector: Policy | None = None
    key_mode: KeyMode = "convex"
    key_frame: KeyFrame = "cached"  # unrotated: keys are averaged as if they stood at the target's position
    # Least cosine of stored keys. The paper's 0.8 leaves most dropped entries unmerged.
    threshold: float = 0.5
    max_votes: int = 64
    # What a merge must pass beside the threshold: nothing; a standard deviation of logit differences of at most
    # ``sigma``; or costing the queries less than the loss of the entry would.
    gate: Gate = "cos"
    sigma: float = 0.9
    order: Order = "evict_first"  # merge_first: entries that would merge compete as one, with their scores' sum
    orphan: Orphan = "drop"  # absorb: who passes no gate still adds its mass and value to its nearest, not its key
    excess: float = 2.0  # nats a log-vote may exceed ln(tokens) by
    references: int = 256  # positions whose queries weigh members; 0: the window's queries, causally
    # Queries to come are most like the recent ones, and stand as far as those from what they look at.
    recency: float = 3.0
    asked: float = 1.0  # weight of the prompt's last queries in the choice of keys, see :class:`Reference`
    round_robin: bool = True  # one query head of a group at each of these positions, in turn
    # Dropped entries whose root mean square weight is below this share of their row's mean are lost: no more
    # than that share of the dropped weight, and most of the work.
    negligible: float = 0.5
    # What judges while decoding: the queries of the last ``window`` tokens, or of the newest alone. The merge is
    # lossless at that one with one query head a KV head, ``orphan="absorb"``, ``negligible=0`` and no ``excess``.
    # ema: attention predicted from all steps, each weighing ``alpha`` times the next, chooses and weighs members; the
    # last ``window`` queries still give log-votes and values. A prompt begins it anew from its own last ``window``.
    judge: Judge = "recent"
    alpha: float = 0.99  # shorter memories diverged more over 256 steps
    value_fit: bool = True  # refit values to the full attention output of the same queries
    ridge: float = 1e-3

    name: ClassVar[str] = "keepkv"

    def __post_init__(self) -> None:
        chosen = self.selector
        if chosen is None:
            object.__setattr__(self, "selector", self._own_selector())
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
        if self.key_frame not in KEY_FRAMES:
            raise ValueError(f"key_frame must be one of {', '.join(KEY_FRAMES)}, got {self.key_frame!r}")
        if not -1 <= self.threshold <= 1:
            raise ValueError(f"threshold is a cosine in [-1, 1], got {self.threshold}")
        if self.max_votes < 1 or self.references < 0 or self.ridge <= 0 or self.excess < 0:
            raise ValueError("max_votes must be >= 1, references >= 0, ridge > 0 and excess >= 0")
        for field, kinds in (("gate", Gate), ("order", Order), ("orphan", Orphan), ("judge", Judge)):
            if getattr(self, field) not in get_args(kinds):
                raise ValueError(f"{field} must be one of {', '.join(get_args(kinds))}, got {getattr(self, field)!r}")
        if self.sigma < 0:
            raise ValueError(f"sigma must be >= 0, got {self.sigma}")
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha is a share in (0, 1), got {self.alpha}")
        if not 0 <= self.negligible < 1:
            raise ValueError(f"negligible is a share in [0, 1), got {self.negligible}")
        if not 0 <= self.window_share < 1:
            raise ValueError(f"window_share is a share in [0, 1), got {self.window_share}")

    @property
    def recall(self) -> int | None:
        return {"last": 1, "ema": max(self.window, STEPS)}.get(self.judge, self.window)

    @property
    def asks_again(self) -> bool:
        return self.judge == "recent"

    @property
    def needs_frames(self) -> bool:
        return self.key_frame == "unrotated"

    def observe(self, length: int) -> int | Tensor:
        if not self.references:
            return self.selector.observe(length) or self.window
        own = spread(length, self.references, self.window, self.recency)
        asked = self.selector.observe(length)
        if isinstance(asked, int):
            asked = torch.arange(max(0, length - asked), length)
        return torch.cat([own, asked]).unique()

    def score(self, entries: Entries, seen: Observation) -> Tensor:
        if self._predicts(seen):
            return self.pin(entries, log_mass(self._predicted(entries, seen)).exp())
        return self.selector.score(entries, seen)

    def represent(self, entries: Entries, seen: Observation, keep: Tensor) -> Entries:
        entries = self._predicted(entries, seen)
        seen = self._weighing(entries, seen)
        blocks = list(attention_blocks(entries, seen, causal=self._causal))
        return self._merge(entries, seen, keep, blocks, attention_rms(entries, seen, blocks=blocks))

    def compress(
        self, layers: Sequence[tuple[Entries, Observation]], budget: Budget, lengths: Sequence[int]
    ) -> Iterator[Entries]:
        shared = self.references and self.selector == self._own_selector()
        if self.allocator != "uniform" or not shared:
            totals = budget.total(lengths, sum(entries.k.shape[1] for entries, _ in layers))
            scores = self.scores(layers)
            for i, quota in enumerate(self.quotas(layers, scores, totals)):
                keep = self.select(self._competing(layers[i][0], scores[i], quota), quota)
                yield self.represent(*layers[i], keep)
            return
        # The queries that choose are those that weigh, and quotas depend on lengths alone: each layer's
        # attention is computed once and serves both.
        rows = sum(entries.k.shape[1] for entries, _ in layers)
        totals = budget.total(lengths, rows)
        window = torch.tensor([self._window(total // rows) for total in totals]).view(-1, 1, 1)
        window = window.to(layers[0][0].pos.device)
        blank = [torch.zeros_like(e.log_votes).masked_fill(~e.valid, -torch.inf) for e, _ in layers]
        quotas = self.allocate(blank, totals)
        parts = together(layers, framed=self.needs_frames)

        def work(part: range) -> list[Entries]:
            kept = self._kept(
                *stack([layers[i] for i in part]),
                torch.cat([quotas[i] for i in part]),
                window.repeat(len(part), 1, 1),
            )
            return unstack(kept, len(part))

        on_cpu = layers[0][0].k.device.type == "cpu"
        threads = min(torch.get_num_threads(), len(parts)) if on_cpu else 1
        for done in in_order(work, parts, threads=threads):
            yield from done

    def _kept(self, entries: Entries, observed: Observation, quota: Tensor, window: Tensor) -> Entries:
        """What is stored of one layer, or of several side by side."""
        entries = self._predicted(entries, observed)
        seen = self._weighing(entries, observed)
        blocks = list(attention_blocks(entries, seen, causal=False))
        rms = attention_rms(entries, seen, blocks=blocks)
        predicts = self._predicts(observed)
        weight = log_mass(entries).exp() if predicts else self.selector.blend(entries, seen, rms, blocks)
        keep = self.keep(entries, weight, quota, window)
        return self._merge(entries, seen, keep, blocks, rms, window)

    def keep(self, entries: Entries, weight: Tensor, quota: Tensor, window: Tensor) -> Tensor:
        """[B, Hkv, N] bool: sinks, the last ``window`` [B, 1, 1] positions, and by ``weight`` up to ``quota``."""
        return self.select(self._competing(entries, self.pin(entries, weight, window), quota), quota)

    def _competing(self, entries: Entries, score: Tensor, quota: Tensor) -> Tensor:
        """The scores that :meth:`select` sees."""
        if self.order == "evict_first":
            return score
        merges = entries.lengths - quota
        return cluster_scores(entries, score, score.isfinite(), merges, threshold=self.threshold)

    def _window(self, quota: int) -> int:
        """Exact recent entries in a row of ``quota``: ``window``, less where it would crowd out the others."""
        return max(1, min(self.window, quota // 2), int(quota * self.window_share))

    @property
    def _causal(self) -> bool:
        return not self.references

    def _own_selector(self) -> Policy:
        """The selector that chooses by the queries that weigh."""
        common = {f: getattr(self, f) for f in ("window", "sinks", "allocator", "floor")}
        if not self.references:
            return SnapKV(**common)
        own = {f: getattr(self, f) for f in ("references", "recency", "asked", "round_robin")}
        return Reference(**common, **own)

    def _predicts(self, seen: Observation) -> bool:
        """Whether predictions choose and weigh; of a prompt there is more to go by."""
        return self.judge == "ema" and seen.decoding

    def _predicted(self, entries: Entries, seen: Observation) -> Entries:
        """``entries`` with predictions, where they are kept."""
        if self.judge != "ema":
            return entries
        return predict(entries, seen if seen.decoding else since(seen, self.window), self.alpha)

    def _weighing(self, entries: Entries, seen: Observation) -> Observation:
        """The queries that weigh members."""
        if self._predicts(seen) or not self.references:
            seen = recent_queries(seen, self.window)
        alone = not self.references or (seen.decoding and self.judge == "last")
        return one_head_each(seen, entries.k.shape[1]) if self.round_robin and not alone else seen

    def _merge(
        self,
        entries: Entries,
        seen: Observation,
        keep: Tensor,
        blocks: list[Block],
        rms: Tensor,
        window: Tensor | None = None,
    ) -> Entries:
        kept, kept_used = compact(keep)
        middle = entries.valid & ~self.pinned(entries, window)
        open_kept = middle.gather(-1, kept) & kept_used
        candidates = middle & ~keep
        if not candidates.any() or not seen.q.shape[2]:
            return entries.take(kept, kept_used)
        log_share = None
        if self._predicts(seen):
            log_share = log_mass(entries)
            rms = log_share.exp()
        if self.negligible:
            mean = rms.masked_fill(~candidates, 0).sum(-1) / candidates.sum(-1).clamp(min=1)
            candidates &= rms >= self.negligible * mean.unsqueeze(-1)
        groups = group_by_similarity(
            entries,
            kept,
            kept_used,
            open_kept,
            *compact(candidates),
            threshold=self.threshold,
            max_votes=self.max_votes,
            gate=self._gate(entries, seen, blocks, compact(candidates)[0]),
            absorb=self.orphan == "absorb",
        )
        out = merge(
            entries,
            seen,
            kept,
            kept_used,
            groups,
            key_mode=self.key_mode,
            key_frame=self.key_frame,
            causal=self._causal,
            excess=self.excess,
            value_fit=self.value_fit,
            ridge=self.ridge,
            open_kept=open_kept,
            blocks=blocks,
            log_share=log_share,
        )
        return merged(entries, out, kept, groups) if isinstance(entries, Predicted) else out

    def _gate(
        self, entries: Entries, seen: Observation, blocks: list[Block], dropped: Tensor
    ) -> Callable[[Tensor], Tensor] | None:
        if self.gate == "sigma":
            return lambda target: logit_spread(entries, seen, dropped, target) <= self.sigma
        if self.gate == "cost":
            return lambda target: worth_merging(entries, blocks, dropped, target)
        return None
