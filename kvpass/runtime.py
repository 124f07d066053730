"""Runs the programs of a compiled model on a cache: which program, with which inputs, and what is committed after."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.cache import CacheError, RaggedCache, Times
from kvpass.kernels.layout import Store
from kvpass.passes.spec import LayerSpec, Program
from kvpass.policies.base import Policy


@dataclass(frozen=True)
class Runtime:
    """The two programs over one set of weights. Holds no state of any sequence."""

    layers: tuple[LayerSpec, ...]
    prefill: Program  # ends in a compression
    step: Program  # appends and attends, nothing else
    policy: Policy
    lower: Callable[[int], Callable]  # batch -> the step program for one token
    dtype: torch.dtype
    takes_keep: bool

    def new_cache(self) -> RaggedCache:
        """An empty cache for this model."""
        return RaggedCache(self.layers, self)

    @torch.no_grad()
    def run(
        self,
        cache: RaggedCache,
        input_ids: Tensor,
        padding: Tensor | None,
        position_ids: Tensor | None,
        keep: Tensor,
    ) -> Tensor:
        """Logits [B, K, V] of the columns ``keep`` [K]; the cache has seen the tokens only when this returns.

        ``padding`` [B, S] bool says which of the new tokens are real; None means all.
        """
        batch, length = input_ids.shape
        if cache.seen is not None and cache.batch_size != batch:
            raise CacheError(f"the cache holds {cache.batch_size} sequences, the input has {batch}")
        one_more = length == 1 and cache.columns > 0
        compresses = not one_more and not cache.record_past and not cache.hold
        like = torch.empty(0, dtype=self.dtype, device=input_ids.device)
        if cache.columns and padding is not None and not bool(padding.all()):
            cache.spare_slots += int((~padding).sum(-1).max())
        cache.padded |= padding is not None and not bool(padding.all())
        cache.prepare(batch, length, exact=compresses, like=like)
        q_pos = _positions(cache, padding, batch, length)
        if position_ids is None:
            position_ids = (cache.columns + torch.arange(length, device=input_ids.device)).expand(batch, -1)
        started = time.perf_counter()
        inputs = [input_ids, position_ids, keep, q_pos, *_tail_inputs(cache)]
        if compresses:
            logits, stores, spent = self._prefill(cache, inputs)
            cache.commit(q_pos)
            cache.replace_stores(stores)
            cache.times = Times(prefill=time.perf_counter() - started - spent, compress=spent)
        else:
            keys, values = _working_tails(cache, length)
            program = self.lower(batch) if one_more else self.step.module
            logits = program(*inputs, *_state(cache, keys, values))
            cache.keys, cache.values = keys, values
            cache.commit(q_pos)
            cache.times.decode += time.perf_counter() - started
            cache.times.decoded += 1
        return logits if self.takes_keep else logits[:, keep]

    def _prefill(self, cache: RaggedCache, inputs: list) -> tuple[Tensor, list[Store | None], float]:
        keys, values = _working_tails(cache, inputs[0].shape[1])
        q_pos = inputs[3]
        metadata = [tensor for store in cache.stores for tensor in (store.tokens, store.pos)]
        observe_at = _observed_columns(self.policy, q_pos)
        logits, (stores, spent) = self.prefill.module(
            *inputs, *_state(cache, keys, values), observe_at, *metadata
        )
        cache.keys, cache.values = keys, values
        return logits, stores, spent


def _positions(cache: RaggedCache, padding: Tensor | None, batch: int, length: int) -> Tensor:
    """[B, S] int32 logical positions of the new tokens, -1 on padding."""
    if padding is None or bool(padding.all()):
        step = torch.arange(length, device=cache.seen.device)
        return (cache.seen[:, None] + step).to(torch.int32)
    counted = cache.seen[:, None] + padding.cumsum(-1) - 1
    return counted.masked_fill(~padding, -1).to(torch.int32)


def _tail_inputs(cache: RaggedCache) -> list[Tensor]:
    found = []
    for tail in cache.tails.values():
        found += [tail.pos, torch.tensor([tail.cursor % max(1, tail.capacity)], device=tail.pos.device)]
    return found


def _working_tails(cache: RaggedCache, length: int) -> tuple[list[Tensor], list[Tensor]]:
    """Tails for a forward to write to. A ring may overwrite tokens that a retry would need, so it gets a copy."""
    if length == 1 or not any(cache.is_sliding):
        return cache.keys, cache.values
    copies = [
        [tensor.clone() if layer.window else tensor for tensor, layer in zip(held, cache.specs, strict=True)]
        for held in (cache.keys, cache.values)
    ]
    return copies[0], copies[1]


def _state(cache: RaggedCache, keys: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    found = []
    for store, key, value in zip(cache.stores, keys, values, strict=True):
        found += [store.k, store.v, store.log_votes, store.row_start, store.row_len, key, value]
    return found


def _observed_columns(policy: Policy, q_pos: Tensor) -> Tensor:
    """[B, W] int64 columns of the queries that the policy wants to see of each sequence, -1 = unused."""
    rows = []
    for positions in q_pos.tolist():
        columns = [column for column, position in enumerate(positions) if position >= 0]
        wanted = policy.observe(len(columns))
        if isinstance(wanted, int):
            rows.append(columns[-wanted:] if wanted else [])
        else:
            rows.append([columns[index] for index in wanted.tolist()])
    width = max(1, *(len(row) for row in rows))
    padded = [row + [-1] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int64, device=q_pos.device)
