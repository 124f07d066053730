"""A text forced token by token through a bounded cache: how far predictions are from the full cache's, and the time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from statistics import mean

import torch
from torch import Tensor, nn

import kvpass
from kvpass import versions
from kvpass.benchmarks.throughput import Progress
from kvpass.policies.base import Policy

AROUND = 96  # steps that a speed is the mean of: three compressions


@torch.inference_mode()
def predictions(model: nn.Module, ids: Tensor, steps: int) -> Tensor:
    """[steps, B, V] log-probabilities after each of the last ``steps`` columns of ``ids``, by the untouched model."""
    logits = model(ids, use_cache=False, logits_to_keep=steps).logits
    return logits.transpose(0, 1).float().log_softmax(-1)


def _step(compiled: nn.Module, ids: Tensor, cache) -> Tensor:
    return compiled(ids, logits_to_keep=1, **{versions.cache_field(): cache}).logits[:, -1]


@torch.inference_mode()
def divergence(
    model: nn.Module,
    ids: Tensor,
    full: Tensor,
    policy: Policy,
    decode_budget: int,
    refresh: int | None,
    progress: Progress,
    label: str,
) -> dict:
    """KL(full || compressed) of the last ``len(full)`` columns of ``ids`` [B, S], each one fed by itself.

    Returns ``kl`` with the mean of each sequence under ``texts``, of each quarter of the steps under ``quarters``, and
    seconds under ``decode_s`` and ``maintain_s``.
    """
    compiled = _compiled(model, policy, decode_budget, refresh)
    cache, first = compiled.kvpass.new_cache(), ids.shape[1] - len(full)
    _step(compiled, ids[:, :first], cache)
    found = []
    for at in progress(range(len(full)), label):
        log_p = _step(compiled, ids[:, first + at : first + at + 1], cache).float().log_softmax(-1)
        found.append((full[at].exp() * (full[at] - log_p)).sum(-1))
    kl = torch.stack(found).double()  # [steps, B]
    return {
        "kl": float(kl.mean()),
        "texts": kl.mean(0).tolist(),
        "quarters": [float(part.mean()) for part in kl.chunk(4)],
        "refreshes": cache.times.refreshes,
        "decode_s": cache.times.decode,
        "maintain_s": cache.times.maintain,
    }


@torch.inference_mode()
def speed(
    model: nn.Module,
    ids: Tensor,
    length: int,
    policy: Policy,
    decode_budget: int,
    at: Iterable[int],
    progress: Progress,
    label: str,
) -> dict:
    """Tokens a second over the ``AROUND`` steps before each step ``at``, and the share of maintenance in decoding."""
    compiled = _compiled(model, policy, decode_budget, None)
    cache, ends = compiled.kvpass.new_cache(), tuple(at)
    _step(compiled, ids[:, :length], cache)
    spent = []
    for step in progress(range(max(ends)), label):
        started = time.perf_counter()
        _step(compiled, ids[:, length + step : length + step + 1], cache)
        spent.append(time.perf_counter() - started)
    times = cache.times
    return {
        "tokens_per_s": {str(end): 1 / mean(spent[max(0, end - AROUND) : end]) for end in ends},
        "maintain_share": times.maintain / (times.maintain + times.decode),
        "entries_a_row": cache.entries() / sum(layer.kv_heads for layer in cache.specs),
        "load_average": os.getloadavg()[0],
    }


def _compiled(model: nn.Module, policy: Policy, decode_budget: int, refresh: int | None) -> nn.Module:
    return kvpass.compile(
        model, budget=decode_budget, policy=policy, decode_budget=decode_budget, refresh=refresh, backend="eager"
    )
