"""What competes in a benchmark: the untouched model, and kvpass at some budget and policy."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvpass import RaggedCache, versions


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    row: str  # A: untouched, C: kvpass that keeps everything, D: kvpass that compresses
    model: nn.Module
    policy: str | None = None
    budget: float | int | None = None

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

    def step(self, token: Tensor) -> tuple[Tensor, float]:
        """Append ``token`` [B, 1]: the next token's logits [B, V], and the seconds of the forward."""
        started = time.perf_counter()
        logits, self.cache = forward(self.variant.model, token, self.cache)
        return logits, time.perf_counter() - started


@torch.inference_mode()
def forward(model: nn.Module, ids: Tensor, cache=None) -> tuple[Tensor, Any]:
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
        logits, cache = forward(variant.model, ids)
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
    return sum(layer.keys.shape[:3].numel() for layer in cache.layers)
