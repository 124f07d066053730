"""All samples of an evaluation, over worker processes, each sample at most once."""

from __future__ import annotations

import multiprocessing
import os
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from itertools import islice
from pathlib import Path

import torch

import kvpass
from kvpass import kernels, models, policies, startup
from kvpass.benchmarks import eval as own_package
from kvpass.benchmarks import tasks
from kvpass.benchmarks.eval.compare import rows
from kvpass.benchmarks.eval.record import Instrument, UnscorableError
from kvpass.benchmarks.eval.settings import Protocol, Settings
from kvpass.benchmarks.eval.shards import Shard
from kvpass.benchmarks.eval.statistics import summarise
from kvpass.benchmarks.tasks import TASKS, Sample
from kvpass.policies.base import Policy
from kvpass.progress import bar
from kvpass.saved import digest_tensors


@dataclass(frozen=True)
class Job:
    """One sample, where its rows go, and what is still to be measured on it."""

    sample: Sample
    length: int
    shard: Shard
    plan: tuple[tuple[str, Policy, float | int], ...]
    protocol: Protocol


def run(settings: Settings, out: Path, loaded: tuple | None = None) -> dict:
    """Measure what is not yet in ``out/shards``; ``{"meta": ..., "rows": ..., "skipped": ..., "summary": ...}``.

    ``loaded`` is ``(model, tokenizer)`` where they are there already; the samples are then measured in this process.
    The same settings give the same result, apart from ``seconds`` and ``meta["date"]``.

    Raises:
        ValueError: as :meth:`Settings.check`; or an unknown model, one that is too short for a length, or a task that
            cannot be made.
        MiscountError: a policy stores another number of entries than its budget.
    """
    settings.check()
    started = time.perf_counter()
    model, tokenizer = loaded or load(settings.model)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(settings.lengths) + settings.protocol.gold
    if limit is not None and longest > limit:
        raise ValueError(f"{longest} tokens of prompt and answer are more than the model's {limit} positions")
    meta = _meta(settings, model)
    wanted = {name: policies.get(name) for name in settings.policies or policies.POLICIES}
    identity = (meta["model_hash"], meta["code"], settings.protocol)
    jobs, todo, found = [], [], {}
    samples, unmade = _samples(settings, tokenizer)
    for place, (length, sample) in zip(_places(samples), samples, strict=True):
        shard = Shard.of(out / "shards", *identity, length, sample)
        done = shard.read()
        plan = _plan(settings, wanted, place)
        left = tuple(item for item in plan if not any(_is(row, item) for row in done))
        jobs.append(Job(sample, length, shard, plan, settings.protocol))
        found[shard] = done
        if left and not _skipped(done):
            todo.append(jobs[-1])
    if loaded or settings.jobs == 1 or len(todo) < 2:
        if not loaded:
            torch.set_num_threads(1)  # as in a worker, so that the figures are the same
        instrument = Instrument.of(model, wanted.values()) if todo else None
        results = ((job, measure(job, instrument, tokenizer)) for job in _in_time(todo, settings))
    else:
        del model
        results = _spread(todo, settings, tuple(wanted.values()))
    missed = {job.shard for job in todo}
    for job, measured in bar(results, "samples", total=len(todo)):
        found[job.shard] = measured
        missed.discard(job.shard)
    meta["policies"] = {name: repr(policy) for name, policy in wanted.items()}
    meta["seconds"] = time.perf_counter() - started
    measured, skipped = _collected(jobs, found, missed)
    few = {name for name, _ in settings.few}
    summary = summarise(measured, settings.seed, few)
    return {"meta": meta, "rows": measured, "skipped": unmade + skipped, "summary": summary}


def _places(samples: Sequence[tuple[int, Sample]]) -> Iterator[int]:
    """The place of each sample in its family and length, whose tasks take turns."""
    tasks, made = defaultdict(dict), Counter()
    for length, sample in samples:
        tasks[length, sample.family].setdefault(sample.task, len(tasks[length, sample.family]))
    for length, sample in samples:
        turns = tasks[length, sample.family]
        yield made[length, sample.task] * len(turns) + turns[sample.task]
        made[length, sample.task] += 1


def _plan(settings: Settings, wanted: Mapping[str, Policy], place: int) -> tuple[tuple[str, Policy, float | int], ...]:
    """What is measured on the sample at ``place``."""
    few = dict(settings.few)
    here = {name: policy for name, policy in wanted.items() if place < few.get(name, place + 1)}
    return tuple((name, policy, budget) for name, policy in here.items() for budget in settings.budgets)


def measure(job: Job, instrument: Instrument, tokenizer) -> list[dict]:
    """The rows of a job, those already in its shard not measured again; the shard then holds all."""
    done = job.shard.read()
    left = [item for item in job.plan if not any(_is(row, item) for row in done)]
    head = {"length": job.length}
    try:
        new = [head | row for row in rows(instrument, job.sample, left, tokenizer, job.protocol)]
        for row, (_, policy, _) in zip(new, left, strict=True):
            row["fields"] = repr(policy)
    except UnscorableError as reason:
        new = [head | {"task": job.sample.task, "id": job.sample.id, "skipped": str(reason)}]
    job.shard.write([*done, *new])
    return [*done, *new]


def load(name: str) -> tuple:
    """``(model, tokenizer)`` of a known name or a checkpoint's directory."""
    if name in models.names():
        return models.load(name)
    if not Path(name).is_dir():
        raise ValueError(f"unknown model {name!r}: neither a checkpoint's directory nor one of {models.names()}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name, local_files_only=True).eval()
    return model, AutoTokenizer.from_pretrained(name, local_files_only=True)


def _samples(settings: Settings, tokenizer) -> tuple[list[tuple[int, Sample]], list[dict]]:
    """All samples with their length, and tasks that cannot be made at some length with the reason."""
    if settings.jsonl is not None:
        own = ((length, tasks.own(settings.jsonl, tokenizer, length)) for length in settings.lengths)
        return [(length, sample) for length, samples in own for sample in samples], []
    made, skipped = [], []
    counts = settings.samples * (len(settings.lengths) if len(settings.samples) == 1 else 1)
    sized = list(zip(settings.lengths, counts, strict=True))
    plan = [(length, count, task) for task in settings.tasks for length, count in sized]
    for length, count, task in bar(plan, "making samples"):
        try:
            samples = TASKS[task](tokenizer, length, count, settings.seed, settings.data)
            made += [(length, sample) for sample in samples]
        except ValueError as reason:
            skipped.append({"length": length, "task": task, "skipped": str(reason)})
    if skipped and not made:
        raise ValueError(skipped[0]["skipped"])
    return made, skipped


def _is(row: dict, item: tuple[str, Policy, float | int]) -> bool:
    name, policy, budget = item
    return (row.get("policy"), row.get("budget"), row.get("fields")) == (name, budget, repr(policy))


def _skipped(done: Sequence[dict]) -> bool:
    return any("skipped" in row for row in done)


def _in_time(jobs: Sequence[Job], settings: Settings) -> Iterator[Job]:
    """The jobs, until the minutes given are over."""
    started = time.perf_counter()
    for job in jobs:
        if settings.minutes is not None and time.perf_counter() - started > 60 * settings.minutes:
            return
        yield job


_worker: tuple[Instrument, object] | None = None  # of this process, where it is a worker


def _spread(jobs: Sequence[Job], settings: Settings, wanted: tuple[Policy, ...]) -> Iterator[tuple[Job, list[dict]]]:
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")  # read by the workers when they start
    pool = ProcessPoolExecutor(
        settings.jobs, multiprocessing.get_context("spawn"), initializer=_start, initargs=(settings.model, wanted)
    )
    try:
        coming = _in_time(jobs, settings)
        waiting: dict[Future, Job] = {}
        while True:
            for job in islice(coming, settings.jobs - len(waiting)):
                waiting[pool.submit(_work, job)] = job
            if not waiting:
                return
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield waiting.pop(future), future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _start(name: str, wanted: tuple[Policy, ...]) -> None:
    global _worker
    torch.set_num_threads(1)
    model, tokenizer = load(name)
    _worker = (Instrument.of(model, wanted), tokenizer)


def _work(job: Job) -> list[dict]:
    return measure(job, *_worker)


def _meta(settings: Settings, model) -> dict:
    files = {name: path and path.name for name, path in (("data", settings.data), ("jsonl", settings.jsonl))}
    return {
        "kvpass": metadata.version(kvpass.__name__),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "model_hash": digest_tensors([*model.named_parameters(), *model.named_buffers()]),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "code": startup.sources(kvpass, kernels, own_package),
        "settings": asdict(settings) | files,
        "protocol": str(settings.protocol),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _collected(jobs: Sequence[Job], found: dict[Shard, list[dict]], missed: set[Shard]) -> tuple[list, list]:
    """Rows in the order of the jobs, and samples that lack some with the reason."""
    measured, skipped = [], []
    for job in jobs:
        rows = found[job.shard]
        order = {(name, budget): at for at, (name, _, budget) in enumerate(job.plan)}
        chosen = [row for row in rows if any(_is(row, item) for item in job.plan)]
        measured += sorted(chosen, key=lambda row: order[row["policy"], row["budget"]])
        skipped += [row for row in rows if "skipped" in row][:1]
        if job.shard in missed:
            head = {"length": job.length, "task": job.sample.task, "id": job.sample.id}
            skipped.append(head | {"skipped": "not reached in the minutes given"})
    return measured, skipped


def without_times(result: dict) -> dict:
    """``result`` less what the machine's speed and the calendar change."""
    meta = {key: value for key, value in result["meta"].items() if key not in ("date", "seconds")}
    return result | {
        "meta": meta,
        "rows": [{key: value for key, value in row.items() if key != "seconds"} for row in result["rows"]],
    }
