"""What competes in a benchmark: the untouched model, and kvpass at some budget and policy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache

from kvpass import RaggedCache, versions


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    row: str  # of throughput.NAMES
    model: nn.Module
    policy: str | None = None
    budget: float | int | None = None
    new_cache: Callable[[], Any] | None = None  # None: the model makes its own
    one_token: Callable | None = None  # runs the steps instead of the model

    def __str__(self) -> str:
        return self.row if self.policy is None else f"{self.row} {self.policy} {self.budget:g}"


@dataclass
class Sequence:
    """A variant in the middle of a text: its cache, and what was measured on it so far."""

    variant: Variant
    cache: Any
    prefill: list[float]  # seconds, one a repeat
    compress: list[float]
    samples: list[float] = field(default_factory=list)  # seconds, one a timed forward
    divergence: float = 0.0  # KL to the reference in nats, summed over positions
    peak_mib: float | None = None  # resident memory that the prompt added at its peak

    def step(self, token: Tensor) -> tuple[Tensor, float]:
        """Append ``token`` [B, 1]: the next token's logits [B, V], and the seconds of the forward."""
        started = time.perf_counter()
        run = self.variant.model if self.variant.one_token is None else self.variant.one_token
        logits, self.cache = forward(run, token, self.cache)
        return logits, time.perf_counter() - started


@torch.inference_mode()
def forward(model: Callable, ids: Tensor, cache=None) -> tuple[Tensor, Any]:
    """Logits [B, V] after the last of ``ids`` [B, S], and the cache."""
    given = {} if cache is None else {versions.cache_field(): cache}
    output = model(ids, use_cache=True, logits_to_keep=1, **given)
    return output.logits[:, -1], getattr(output, versions.cache_field())


def prefill(variant: Variant, ids: Tensor, repeats: int) -> tuple[Tensor, Sequence]:
    """The first token's logits and a started sequence; the prompt runs ``repeats`` times."""
    whole, compress = [], []
    for _ in range(repeats):
        # Two full caches at once would double the peak.
        logits = cache = None
        started = time.perf_counter()
        logits, cache = forward(variant.model, ids, variant.new_cache and variant.new_cache())
        whole.append(time.perf_counter() - started)
        compress.append(cache.times.compress if isinstance(cache, RaggedCache) else 0.0)
    both = zip(whole, compress, strict=True)
    return logits, Sequence(variant, cache, [total - spent for total, spent in both], compress)


def cache_bytes(cache) -> int:
    """Bytes of the storages behind a cache, each counted once."""
    if isinstance(cache, RaggedCache):
        return cache.nbytes()
    held = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in held}
    return sum(storage.nbytes() for storage in storages.values())


def cache_entries(cache) -> int:
    """Entries of a cache, over layers, sequences and KV heads."""
    if isinstance(cache, RaggedCache):
        return cache.entries()
    return sum(batch * heads * held for batch, heads, held, _ in _held(cache))


def cache_read_bytes(cache) -> int:
    """Bytes of keys, values and log-votes that a step has to read: entries, without slack and metadata."""
    if isinstance(cache, RaggedCache):
        parts = zip(cache.lengths(), cache.stores, cache.keys, cache.values, strict=True)
        return sum(
            int(rows.sum()) * (key.shape[-1] + value.shape[-1]) * key.element_size() + store.log_votes.nbytes
            for rows, store, key, value in parts
        )
    return sum(batch * heads * held * width for batch, heads, held, width in _held(cache))


def _held(cache) -> list[tuple[int, int, int, int]]:
    """Per layer of a stock cache: sequences, KV heads, tokens held, bytes of one key and value."""
    found = []
    for layer in cache.layers:
        batch, heads, slots, _ = layer.keys.shape
        held = min(slots, int(layer.get_seq_length())) if isinstance(cache, StaticCache) else slots
        width = (layer.keys.shape[-1] + layer.values.shape[-1]) * layer.keys.element_size()
        found.append((batch, heads, held, width))
    return found


def stock(row: str, model: nn.Module, slots: int) -> Variant:
    """The untouched model: eager (A), and on a cache of ``slots`` allocated slots, eager (B) or its steps by
    ``torch.compile`` (A')."""
    if row == "A":
        return Variant(row, model)

    def new_cache():
        return StaticCache(config=model.config, max_cache_len=slots)

    return Variant(row, model, new_cache=new_cache, one_token=torch.compile(model) if row == "A'" else None)
