"""One policy at one budget on a recording: compress, check what is stored, and read the continuation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.benchmarks.eval.prepare import Prepared
from kvpass.benchmarks.eval.record import Recording
from kvpass.budget import Budget
from kvpass.cache import RaggedCache
from kvpass.kernels.layout import Store, pack
from kvpass.passes.spec import KVPassError
from kvpass.policies.regions import join


class MiscountError(KVPassError):
    """A policy stored another number of entries than its budget."""


@dataclass(frozen=True)
class Trial:
    """A recording's prompt, compressed."""

    cache: RaggedCache  # at the cut
    entries: int  # of full-attention layers, free ones included
    allowed: int  # what the budget and the free ends permit
    nbytes: int  # of the storages, metadata included
    seconds: float  # of compression, packing included


@torch.no_grad()
def compress(recording: Recording, prepared: Prepared, budget: Budget) -> Trial:
    """Compress the recorded prompt as a prefill would.

    Raises:
        MiscountError: the policy keeps more than the budget, or over 1 % less.
    """
    regions, cut = recording.regions, recording.cut
    own = regions.context(cut)
    spared, started = prepared.spared, time.perf_counter()
    kept = prepared.policy.compress(prepared.layers, budget, [own])
    packed = [pack(join(front, part, back)) for (front, _, back), part in zip(recording.parts, kept, strict=True)]
    seconds = time.perf_counter() - started + prepared.spared - spared
    entries = sum(store.k.shape[0] for store in packed)
    rows = recording.instrument.rows
    allowed = budget.total([own], rows)[0] + (cut - own) * rows
    if not 0.99 * allowed <= entries <= allowed:
        raise MiscountError(f"{prepared.policy} stores {entries} entries where {budget} permits {allowed}")
    cache = recording.snapshot.fork()
    stores: list[Store | None] = [None] * len(recording.instrument.runtime.layers)
    for index, store in zip(recording.instrument.full, packed, strict=True):
        stores[index] = store
    cache.replace_stores(stores)
    return Trial(cache, entries, allowed, cache.nbytes(), seconds)


def forced(recording: Recording, trial: Trial) -> Tensor:
    """[T, V] log-probabilities at the scored tokens, the continuation teacher-forced on the compressed cache."""
    columns = range(len(recording.rest) - len(recording.gold), len(recording.rest))
    return recording.instrument.run(trial.cache.fork(), recording.rest, columns).log_softmax(-1)


def generated(recording: Recording, cache: RaggedCache, count: int, ends: Sequence[int]) -> list[int]:
    """At most ``count`` greedy tokens after the prompt, up to one of ``ends``; ``cache`` stays as it is."""
    instrument, cache = recording.instrument, cache.fork()
    question = recording.question
    logits = instrument.run(cache, question, [len(question) - 1])[0] if question else recording.first
    made: list[int] = []
    while len(made) < count and (token := int(logits.argmax())) not in ends:
        made.append(token)
        if len(made) < count:
            logits = instrument.run(cache, [token])[0]
    return made
