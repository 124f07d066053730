"""Rebuilding compressed rows from the full keys and values while decoding (KeepKV, arXiv 2504.09936, section 1).

The step at which rows are rebuilt runs on the full cache, and its own queries are among those that judge: recomputed on
the rebuilt rows it is what it was, where the policy merges without loss at that query (``KeepKV(judge="last")``, one
query head a KV head). Queries from all over the text are kept outside too, and judge: what the last few tokens ask for
is little to go by. Between two such steps the cache is what it is without.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

import torch
from torch import Tensor

from kvpass.cache import Observed, RaggedCache
from kvpass.full import Full
from kvpass.kernels.entries import Observation
from kvpass.kernels.layout import Store, unpack
from kvpass.kernels.score import attention_mass
from kvpass.policies.base import Policy

LOOK = 8  # steps between two looks at how far attention has moved


@dataclass(frozen=True)
class Refresh:
    """When rows are rebuilt, and where the full keys and values are until then.

    Raises:
        ValueError: a number out of range, or a folder that does not exist.
    """

    every: int | None = 64  # steps between two; None: only by ``threshold``
    where: str | os.PathLike = "memory"  # of the host; or a folder, for a nameless file that is mapped from there
    limit: int | None = None  # bytes the full keys and values of one cache may take; beyond it goes on without
    # Share of its attention, in (0, 1), that a step may have moved since the first one after the last compression:
    # half the L1 distance of both softmax distributions over the stored entries, averaged over layers and heads.
    # An estimate, as what was dropped is not seen. Looked at every 8 steps; None: never.
    threshold: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("limit", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < least):
                raise ValueError(f"refresh: {name} must be an int >= {least} or None, got {value!r}")
        if self.threshold is not None and not (isinstance(self.threshold, Real) and 0 < self.threshold < 1):
            raise ValueError(f"refresh: threshold is a share in (0, 1), got {self.threshold!r}")
        if self.every is None and self.threshold is None:
            raise ValueError("refresh: with every=None a threshold must say when")
        if self.where != "memory" and not Path(self.where).is_dir():
            raise ValueError(f"refresh: where is 'memory' or a folder that exists, got {str(self.where)!r}")

    @staticmethod
    def parse(value: int | Refresh | None) -> Refresh | None:
        """``64`` is ``Refresh(every=64)``."""
        return value if value is None or isinstance(value, Refresh) else Refresh(every=value)


def keep_tail(cache: RaggedCache, refresh: Refresh | None) -> None:
    """Copy the tail to the full keys and values, before it is compressed."""
    if refresh is None or 0 not in cache.tails:
        return
    if cache.full is None:
        cache.full = Full(refresh.where, refresh.limit)
    tail, chosen = cache.tails[0], _full_layers(cache)
    held = [[tensors[index][:, :, : tail.cursor] for index in chosen] for tensors in (cache.keys, cache.values)]
    cache.full.append(*held, tail.pos[:, : tail.cursor])


def full_stores(cache: RaggedCache, refresh: Refresh | None) -> list[Store] | None:
    """Every layer's store with all its tokens, if it is time for it and they are there."""
    if refresh is None or cache.full is None or cache.record_past:
        return None
    if cache.full.stopped:
        cache.asked = None
        return None
    if not (refresh.every is not None and cache.steps + 1 >= refresh.every) and not _moved(cache, refresh.threshold):
        return None
    loaded = cache.full.load(cache.seen)
    if loaded is None:
        return None
    stores = list(cache.stores)
    for index, store in zip(_full_layers(cache), loaded, strict=True):
        stores[index] = store
    return stores


def thinned(asked: Observed, policy: Policy, seen: Tensor) -> Observed:
    """Of the queries in ``asked``, for each sequence of ``seen`` [B] tokens those nearest to where ``policy`` would
    observe a prompt of that length."""
    chosen = []
    for pos, total in zip(asked.pos, seen.tolist(), strict=True):
        held, order = pos.long().sort(stable=True)
        held, order = held[pos[order] >= 0], order[pos[order] >= 0]
        wanted = policy.observe(total)
        wanted = torch.arange(max(0, total - wanted), total) if isinstance(wanted, int) else wanted
        right = torch.searchsorted(held, wanted.to(held.device)).clamp(max=len(held) - 1)
        left = (right - 1).clamp(min=0)
        nearer = (wanted.to(held.device) - held[left]).abs() < (held[right] - wanted.to(held.device)).abs()
        chosen.append(order[torch.where(nearer, left, right).unique()])
    index = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
    used = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in chosen], batch_first=True) > 0
    queries = [q.gather(2, index[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])) for q in asked.queries]
    return Observed(queries, asked.pos.gather(1, index).masked_fill(~used, -1), asked.real)


def _full_layers(cache: RaggedCache) -> list[int]:
    return [index for index, layer in enumerate(cache.specs) if not layer.window]


def _moved(cache: RaggedCache, threshold: float | None) -> bool:
    if threshold is None or cache.anchor is None or cache.steps % LOOK:
        return False
    return drift(cache, cache.anchor, cache.recent[-1]) > threshold


def drift(cache: RaggedCache, then: Observed, now: Observed) -> float:
    """Share of attention to the stored entries that moved between two steps, see :class:`Refresh`."""
    shares = []
    for index in _full_layers(cache):
        entries, layer = unpack(cache.stores[index]), cache.specs[index]
        before, after = (
            attention_mass(entries, _asking(part, index, layer.scale), causal=False, per_head=True)
            for part in (then, now)
        )
        shares.append((before - after).abs().sum(-1).mean() / 2)
    return float(torch.stack(shares).mean())


def _asking(part: Observed, index: int, scale: float) -> Observation:
    return Observation(part.queries[index], part.pos, scale)
