"""Runs the programs of a compiled model on a cache: which program, with which inputs, and what is committed after."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvpass.cache import CacheError, Observed, RaggedCache, Times
from kvpass.compression import Chunk, Compress, Compressed, joined
from kvpass.kernels.layout import Store
from kvpass.passes.spec import LayerSpec, Program
from kvpass.policies.base import Policy
from kvpass.refresh import Refresh, full_stores, keep_tail, thinned

REMEMBERED = 256  # steps whose queries are held before they are thinned out, where rows are refreshed
SLACK = 32  # tokens a row may grow beyond its decode budget before it is compressed again


@dataclass(frozen=True)
class Runtime:
    """The two programs over one set of weights. Holds no state of any sequence."""

    layers: tuple[LayerSpec, ...]
    prefill: Program  # ends in a compression
    step: Program  # appends and attends, nothing else
    policy: Policy
    lower: Callable[[int], Callable]  # batch -> the step program for one token
    dtype: torch.dtype  # of stored keys and values
    takes_keep: bool
    maintain: Compress | None = None  # compresses while decoding; the step program then returns its queries
    bounded: bool = False  # whether ``maintain`` holds a decode budget, or only refreshes
    refresh: Refresh | None = None
    rehearsal: Program | None = None  # the step program, returning queries, where the policy rehearses

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
        if self.rehearsal is not None and cache.columns and not cache.pending and self._prompt_columns(cache, length):
            raise CacheError(f"policy {self.policy.name!r} rehearses a whole prompt; its cache takes no second one")
        if position_ids is None:
            position_ids = (cache.columns + torch.arange(length, device=input_ids.device)).expand(batch, -1)
        prompt = self._prompt_columns(cache, length)
        if not 0 < prompt < length:
            return self._piece(cache, input_ids, padding, position_ids, keep, compresses=prompt > 0)
        # Drafted tokens came with the prompt: they are judged by the compressed cache, like every later token.
        first, second = slice(None, prompt), slice(prompt, None)
        parts = []
        for part, offset, compresses in ((first, 0, True), (second, prompt, False)):
            columns = keep[(keep < prompt) == compresses] - offset
            logits = self._piece(
                cache,
                input_ids[:, part],
                None if padding is None else padding[:, part],
                position_ids[:, part],
                columns if len(columns) else keep.new_zeros(1),
                compresses,
            )
            parts.append(logits[:, : len(columns)])
        return torch.cat(parts, 1)

    def _prompt_columns(self, cache: RaggedCache, length: int) -> int:
        """How many of the new columns belong to a prompt; the rest continue it."""
        if cache.prompt_end is not None:
            return min(length, max(0, cache.prompt_end - cache.columns))
        return length if cache.columns == 0 or (length > 1 and not cache.record_past) else 0

    def _piece(self, cache, input_ids, padding, position_ids, keep, compresses: bool) -> Tensor:
        batch, length = input_ids.shape
        like = torch.empty(0, dtype=self.dtype, device=input_ids.device)
        if padding is not None and not bool(padding.all()):
            cache.padded = True
            if cache.columns:
                cache.spare_slots += int((~padding).sum(-1).max())
        cache.prepare(batch, length, exact=compresses, like=like)
        q_pos = _positions(cache, padding, batch, length)
        started = time.perf_counter()
        # Compiled steps read dense memory: a column of a longer tensor, or positions expanded over the batch, is not.
        given = [tensor.contiguous() for tensor in (input_ids, position_ids, keep, q_pos)]
        inputs = [*given, *_tail_inputs(cache)]
        keys, values = _working_tails(cache, length)
        rebuilt = None if compresses else full_stores(cache, self.refresh)
        state = _state(rebuilt or cache.stores, keys, values)
        result = None
        if compresses:
            tokens, rehearse = (), None
            if self.rehearsal is not None:
                tokens = tuple(row[at >= 0] for row, at in zip(input_ids, q_pos, strict=True))
                rehearse = partial(self._rehearse, cache, keys, values, q_pos, tokens)
            logits, result = self._prefill(cache, inputs, state, rehearse)
        else:
            program = self.lower(batch) if length == 1 else self.step.module
            logits = program(*inputs, *state)
            if self.maintain is not None:
                logits, *queries = logits
                result = Observed(queries, q_pos, (q_pos >= 0).sum(-1))
        cache.keys, cache.values = keys, values
        cache.commit(q_pos)
        spent = time.perf_counter() - started
        if isinstance(result, Compressed):
            keep_tail(cache, self.refresh)
            cache.replace_stores(result.stores)
            if self.refresh is not None and self.policy.asks_again:
                cache.asked = replace(result.seen, hidden=(), hidden_pos=None)
            cache.pending, cache.recent, cache.steps, cache.anchor = [], [], 0, None
            earlier = cache.times.prefill if cache.times.chunked else 0.0
            cache.times = Times(prefill=earlier + spent - result.seconds, compress=result.seconds)
        elif compresses:
            cache.pending.append(replace(result, tokens=tokens))
            cache.times.prefill = spent + (cache.times.prefill if cache.times.chunked else 0.0)
            cache.times.chunked = True
        else:
            cache.times.decode += spent
            cache.times.decoded += 1
            if self.maintain is not None:
                self._maintain(cache, result, rebuilt)
        return logits if self.takes_keep else logits[:, keep]

    def _maintain(self, cache: RaggedCache, latest: Observed, rebuilt: list[Store] | None) -> None:
        """Compress again: ``rebuilt`` stores at once, the cache's own once they are ``SLACK`` above the budget."""
        started = time.perf_counter()
        cache.recent = [*cache.recent, latest]
        if cache.asked is None:
            cache.recent = self._recalled(cache)
        elif len(cache.recent) >= REMEMBERED:
            self._remember(cache)
        cache.steps += 1
        if cache.anchor is None and self.refresh is not None and self.refresh.threshold is not None:
            cache.anchor = latest
        if rebuilt is None and not self._crowded(cache):
            return
        stores = rebuilt or cache.stores
        state = [
            [*fields, store.tokens, store.pos, store.ema]
            for fields, store in zip(_by_layer(stores, cache.keys, cache.values), stores, strict=True)
        ]
        if rebuilt is not None and cache.asked is not None:
            self._remember(cache)
            seen = cache.asked
        else:
            seen = joined(self._recalled(cache))
        stores = self.maintain.pack_rows(state, cache.tails[0].pos, seen)
        keep_tail(cache, self.refresh)
        cache.replace_stores(stores)
        cache.anchor = None
        if rebuilt is not None:
            cache.steps, cache.times.refreshes = 0, cache.times.refreshes + 1
        cache.times.maintain += time.perf_counter() - started

    def _recalled(self, cache: RaggedCache) -> list[Observed]:
        """Queries of the last tokens that judge while decoding."""
        return cache.recent if self.policy.recall is None else cache.recent[-self.policy.recall :]

    def _remember(self, cache: RaggedCache) -> None:
        """Add the decoded tokens' queries to those from all over the text."""
        cache.asked = thinned(joined([cache.asked, *cache.recent]), self.policy, cache.seen)
        cache.recent = self._recalled(cache)

    def _crowded(self, cache: RaggedCache) -> bool:
        """Whether the rows of full-attention layers are ``SLACK`` entries above the decode budget."""
        rows = sum(layer.kv_heads for layer in self.layers if not layer.window)
        if not self.bounded or not rows or cache.record_past or cache.tails[0].cursor < SLACK:
            return False
        stored = sum(store.k.shape[0] for store in cache.stores)
        allowed = sum(self.maintain.budget.total(cache.seen.tolist(), rows))
        return stored + rows * cache.batch_size * cache.tails[0].cursor >= allowed + rows * cache.batch_size * SLACK

    def _rehearse(self, cache: RaggedCache, keys, values, q_pos: Tensor, tokens: tuple[Tensor, ...]) -> Observed:
        """Queries and keys of what the policy rehearses, on a copy of the full cache; ``tokens`` end the prompt."""
        twin = cache.fork()
        twin.keys, twin.values = list(keys), list(values)
        twin.commit(q_pos)
        prompts = zip(*(part.tokens for part in cache.pending), tokens, strict=True)
        rows = [self.policy.rehearsal(torch.cat(parts)) for parts in prompts]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        batch, length = ids.shape
        real = torch.arange(length, device=ids.device) < ids.new_tensor([[len(row)] for row in rows])
        if not bool(real.all()):
            twin.padded = True
            twin.spare_slots += int((~real).sum(-1).max())
        twin.prepare(batch, length, exact=True, like=torch.empty(0, dtype=self.dtype, device=ids.device))
        pos = _positions(twin, real, batch, length)
        inputs = [ids, pos.clamp(min=0).long(), ids.new_zeros(1), pos, *_tail_inputs(twin)]
        keys, values = _working_tails(twin, length)
        _, *queries = self.rehearsal.module(*inputs, *_state(twin.stores, keys, values))
        at = twin.tails[0].cursor
        own = [key[:, :, at : at + length] for key in keys]  # a sliding layer's mean nothing, and nobody asks
        return Observed(queries, pos, real.sum(-1), keys=own, key_pos=pos)

    def _prefill(
        self, cache: RaggedCache, inputs: list, state: list[Tensor], rehearse: Callable[[], Observed] | None
    ) -> tuple[Tensor, Compressed | Observed]:
        q_pos = inputs[3]
        end = cache.columns + q_pos.shape[1] if cache.prompt_end is None else cache.prompt_end
        later = end - cache.columns - q_pos.shape[1]
        chunk = Chunk(tuple(cache.pending), more=later > 0, rehearse=rehearse)
        begun = cache.seen - sum((part.real for part in cache.pending), start=torch.zeros_like(cache.seen))
        columns = _observed_columns(self.policy, q_pos, begun, later)
        metadata = [tensor for store in cache.stores for tensor in (store.tokens, store.pos)]
        return self.prefill.module(*inputs, *state, chunk, columns, *metadata)


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


def _state(stores: list[Store], keys: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    return [field for fields in _by_layer(stores, keys, values) for field in fields]


def _by_layer(stores: list[Store], keys: list[Tensor], values: list[Tensor]) -> list[list[Tensor]]:
    return [
        [store.k, store.v, store.log_votes, store.row_start, store.row_len, key, value]
        for store, key, value in zip(stores, keys, values, strict=True)
    ]


def _observed_columns(policy: Policy, q_pos: Tensor, begun: Tensor, later: int) -> Tensor:
    """[B, W] int64 columns of the queries that the policy wants to see of each sequence, -1 = unused.

    The policy speaks of the whole prompt: it began at position ``begun`` [B], and ``later`` tokens are still to come.
    """
    rows = []
    for positions, start in zip(q_pos.tolist(), begun.tolist(), strict=True):
        at = {position - start: column for column, position in enumerate(positions) if position >= 0}
        total = max(at) + 1 + later
        wanted = policy.observe(total)
        indices = range(max(0, total - wanted), total) if isinstance(wanted, int) else wanted.tolist()
        rows.append([at[index] for index in indices if index in at])
    width = max(1, *(len(row) for row in rows))
    padded = [row + [-1] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int64, device=q_pos.device)
