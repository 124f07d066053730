"""Any policies, at any budgets, on any samples: rows of figures."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby

from torch import nn

from kvpass.benchmarks.eval import trial
from kvpass.benchmarks.eval.attention import output_errors
from kvpass.benchmarks.eval.metrics import fidelity
from kvpass.benchmarks.eval.prepare import Prepared
from kvpass.benchmarks.eval.record import Instrument, Recording, record
from kvpass.benchmarks.eval.settings import Protocol
from kvpass.benchmarks.tasks import METRICS, Sample, Tokens, encode
from kvpass.budget import Budget
from kvpass.policies.base import Policy
from kvpass.progress import bar


def compare(
    policies: Mapping[str, Policy],
    budgets: Iterable[float | int],
    samples: Iterable[Sample],
    model: nn.Module,
    tokenizer=None,
    protocol: Protocol | None = None,
) -> list[dict]:
    """One row for each sample, policy and budget, in this order; see :func:`rows` for what stands in it.

    >>> rows = compare({"mine": MyPolicy(), "snapkv": SnapKV()}, [0.2, 0.1], samples, *models.load("smollm2"))
    """
    instrument = Instrument.of(model, policies.values())
    plan = [(name, policy, budget) for name, policy in policies.items() for budget in budgets]
    found = []
    for sample in bar(list(samples), "samples"):
        found += rows(instrument, sample, plan, tokenizer, protocol or Protocol())
    return found


def rows(
    instrument: Instrument,
    sample: Sample,
    plan: Iterable[tuple[str, Policy, float | int]],
    tokenizer,
    protocol: Protocol,
) -> Iterator[dict]:
    """Rows of one sample, from one prefill.

    Each holds ``task``, ``id``, ``family``, ``policy``, ``budget``, whether the policy knows the ``future``, the
    figures of :func:`kvpass.benchmarks.eval.metrics.fidelity`, ``scored`` tokens, ``tokens`` of the prompt and of the
    ``context``, physical ``entries`` with what is ``allowed``, ``bytes`` and ``bytes_full``, and under ``seconds`` all
    that time changes. With ``attention``: ``attention_error``, one relative error a layer. With ``generate``: ``said``,
    ``score`` and ``score_full``.
    """
    tokens = encode(sample, tokenizer)
    tokens = replace(tokens, gold=tokens.gold[: protocol.gold])
    if tokenizer is None:  # bytes, of which a tiny model knows only some
        tokens = Tokens(*(tuple(token % instrument.vocabulary for token in part) for part in vars(tokens).values()))
    started = time.perf_counter()
    recording = record(instrument, tokens, aware=protocol.aware, free=protocol.free)
    prefill = time.perf_counter() - started
    told = _told(sample, recording, recording.snapshot, tokenizer) if protocol.generate else {}
    for (name, policy), items in groupby(plan, key=lambda item: item[:2]):
        started = time.perf_counter()
        prepared = Prepared.of(recording, policy)
        seconds = {"prefill": prefill, "observe": time.perf_counter() - started}
        for _, _, budget in items:
            row = {"task": sample.task, "id": sample.id, "family": sample.family, "policy": name, "budget": budget}
            row |= {"future": policy.wants == "continuation"}
            row |= _measured(sample, tokens, recording, prepared, budget, tokenizer, protocol, seconds)
            yield row | {f"{key}_full": value for key, value in told.items()}


def _measured(sample: Sample, tokens: Tokens, recording: Recording, prepared, budget, tokenizer, protocol, seconds):
    made = trial.compress(recording, prepared, Budget.parse(budget))
    started = time.perf_counter()
    log_p = trial.forced(recording, made)
    read = time.perf_counter() - started
    row = {
        **fidelity(log_p, recording.full, recording.without, recording.gold),
        "scored": len(recording.gold),
        "tokens": len(tokens.prefix) + len(tokens.context) + len(tokens.suffix),
        "context": len(tokens.context),
        "entries": made.entries,
        "allowed": made.allowed,
        "bytes": made.nbytes,
        "bytes_full": recording.snapshot.nbytes(),
        "seconds": {**seconds, "compress": made.seconds, "read": read},
    }
    if protocol.attention:
        row["attention_error"] = output_errors(recording, made)
    if protocol.generate:
        row |= _told(sample, recording, made.cache, tokenizer)
    return row


def _told(sample: Sample, recording: Recording, cache, tokenizer) -> dict:
    """What the model says on ``cache``, and the score by the task's metric."""
    if not sample.metric or not sample.new_tokens:
        return {"said": None, "score": None}
    ids = trial.generated(recording, cache, sample.new_tokens, recording.instrument.ends)
    said = bytes(token % 256 for token in ids).decode(errors="replace") if tokenizer is None else tokenizer.decode(ids)
    return {"said": said, "score": float(METRICS[sample.metric](said, sample.answers, sample.classes))}
