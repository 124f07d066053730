"""``kvpass bench``: the untouched model against kvpass, interleaved in one process, on the same real text."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median

from kvpass.benchmarks.throughput_table import LOAD_LIMIT, NAMES, TURN, table
from kvpass.progress import bar

WARM_UP = 4  # forwards before the timed ones; the first one compiles
BUSY = 3  # exit code

Progress = Callable[[Iterable, str], Iterable]


class BusyError(RuntimeError):
    """The machine has other work, so ratios would mean nothing."""


@dataclass(frozen=True)
class Options:
    """What to measure."""

    model: str = "smollm2"
    length: int = 2048
    batch: int = 1
    budgets: tuple[float | int, ...] = (0.1,)
    policies: tuple[str, ...] = ("unified",)
    steps: int = 32
    repeats: int = 1
    threads: int | None = None  # None: as torch chooses
    seed: int = 0
    backend: str = "inductor"
    kv_dtype: str | None = None  # of the compressing rows; the others keep the model's own
    rows: tuple[str, ...] = ("A", "B", "C", "D")
    anyway: bool = False

    def check(self) -> float:
        """Refuse what cannot be measured, before any work; the 1-minute load average.

        Raises:
            ValueError: a count below 1, or a budget or policy that does not exist.
            BusyError: the load average is above the limit and ``anyway`` is not set.
        """
        from kvpass import policies
        from kvpass.budget import Budget

        for name in ("length", "batch", "steps", "repeats", "threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if unknown := [row for row in self.rows if row not in NAMES]:
            raise ValueError(f"unknown row {unknown[0]!r}; known: {', '.join(NAMES)}")
        if not {"A", "C"} <= set(self.rows):
            raise ValueError("rows A and C are what the others are compared with; they cannot be left out")
        for budget in self.budgets:
            Budget.parse(budget)
        for policy in self.policies:
            policies.get(policy)
        if (load := os.getloadavg()[0]) > LOAD_LIMIT and not self.anyway:
            raise BusyError(
                f"the machine is busy (1-minute load average {load:.1f}, limit {LOAD_LIMIT}), so ratios "
                "would mean nothing; wait, or measure all the same with --anyway"
            )
        return load


def run(options: Options, progress: Progress = bar) -> dict:
    """:func:`sweep` of one prompt: ``{"meta": ..., "rows": [...]}``."""
    return sweep([options], progress)[0]


def sweep(settings: Sequence[Options], progress: Progress = bar) -> list[dict]:
    """Load the model, measure every setting, return ``{"meta": ..., "rows": [...]}`` of each.

    The settings differ in length and batch only.

    Raises:
        ValueError, BusyError: as :meth:`Options.check`; ValueError also for an unknown model or a
            prompt that is too long for it.
    """
    loads = [options.check() for options in settings]
    import kvpass
    from kvpass import models

    first = settings[0]
    model, tokenizer = models.load(first.model)

    def build(budget, policy):
        kv_dtype = first.kv_dtype if budget != 1.0 else None
        return kvpass.compile(model, budget=budget, policy=policy, backend=first.backend, kv_dtype=kv_dtype)

    # A machine that was quiet before the first prompt is busy with ours before the second.
    return [measure(model, tokenizer, options, build, loads[0], progress) for options in settings]


def measure(model, tokenizer, options: Options, build: Callable, load: float, progress: Progress = bar) -> dict:
    """As :func:`run`, on a loaded model; ``build(budget, policy)`` compiles it."""
    import torch

    from kvpass.benchmarks import roofline, text, variants

    meta = _meta(model, options, load)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and options.length > limit:
        raise ValueError(f"length {options.length} is more than the model's {limit} positions")
    before = torch.get_num_threads()
    torch.set_num_threads(meta["threads"])
    try:
        vocabulary = model.config.get_text_config().vocab_size
        ids = text.prompt(tokenizer, vocabulary, options.length, options.batch, options.seed)
        slots = options.length + WARM_UP + options.steps
        plan = _plan(options)
        sequences, forced = [], None
        for row, policy, budget in progress(plan, "compile and read the prompt"):
            variant = (
                variants.stock(row, model, slots)
                if policy is None
                else variants.Variant(row, build(budget, policy), policy, budget)
            )
            variants.forward(variant.model, ids[:, :32])  # what only the first call pays for
            with roofline.Peak() as peak:
                logits, sequence = variants.prefill(variant, ids, options.repeats)
            sequence.peak_mib = peak.mib
            if forced is None:
                forced = _greedy(sequence, logits, WARM_UP + options.steps, progress)
            sequences.append(sequence)
        ceilings = [roofline.ceiling()]
        _decode(sequences, forced, progress)
        ceilings.append(roofline.ceiling())
    finally:
        torch.set_num_threads(before)
    meta["load_average_end"], meta["read_gb_per_s"] = os.getloadavg()[0], ceilings
    meta["forced_positions"], meta["forced_tokens"] = forced.numel(), forced.tolist()
    rows = _rows(sequences, options, forced.numel())
    weights = roofline.weight_bytes(model)
    for row, sequence in zip(rows, sequences, strict=True):
        roofline.fill(row, weights, sequence.cache, None if None in ceilings else sum(ceilings) / 2)
    return {"meta": meta, "rows": rows}


def _plan(options: Options) -> list[tuple]:
    """Rows in the order of the table, as (row, policy, budget); the first is what the others diverge from."""
    compressing = [("D", policy, budget) for policy in options.policies for budget in options.budgets]
    of_row = {"C": [("C", options.policies[0], 1.0)], "D": compressing}
    return [entry for row in NAMES if row in options.rows for entry in of_row.get(row, [(row, None, None)])]


def _greedy(sequence, logits, count: int, progress: Progress):
    """[B, count] the sequence's own continuation; the sequence stays at the end of its prompt."""
    import copy

    import torch

    from kvpass.benchmarks.variants import forward

    # A sliding cache cannot be cropped back, so a copy runs ahead.
    cache, tokens = copy.deepcopy(sequence.cache), [logits.argmax(-1, keepdim=True)]
    for _ in progress(range(count - 1), "tokens to force"):
        logits, cache = forward(sequence.variant.model, tokens[-1], cache)
        tokens.append(logits.argmax(-1, keepdim=True))
    return torch.cat(tokens, 1)


def _decode(sequences: list, forced, progress: Progress) -> None:
    """Force the tokens [B, N] on every sequence in turns, so that a disturbance of the machine hits all."""
    for start in progress(range(0, forced.shape[1], TURN), "decode in turns"):
        columns = range(start, min(start + TURN, forced.shape[1]))
        reference = []  # the untouched model goes first
        for sequence in sequences:
            for at, column in enumerate(columns):
                logits, seconds = sequence.step(forced[:, column : column + 1])
                log_p = logits.float().log_softmax(-1)
                if sequence is sequences[0]:
                    reference.append(log_p)
                else:
                    full = reference[at]
                    sequence.divergence += float((full.exp() * (full - log_p)).sum())
                if column >= WARM_UP:
                    sequence.samples.append(seconds)


def _meta(model, options: Options, load: float) -> dict:
    import torch

    import kvpass

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "kvpass": metadata.version(kvpass.__name__),
        "threads": options.threads or torch.get_num_threads(),
        "model": options.model,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "backend": options.backend,
        "kv_dtype": options.kv_dtype,
        "seed": options.seed,
        "load_average": load,
        "anyway": options.anyway,
        "length": options.length,
        "batch": options.batch,
        "steps": options.steps,
        "warm_up": WARM_UP,
        "repeats": options.repeats,
        "platform": platform.platform(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _rows(sequences: list, options: Options, positions: int) -> list[dict]:
    import numpy as np

    from kvpass.benchmarks import roofline
    from kvpass.benchmarks.variants import cache_bytes, cache_entries

    rows = []
    for sequence in sequences:
        samples = [1e3 * seconds for seconds in sequence.samples]
        p10, middle, p90 = (float(value) for value in np.percentile(samples, [10, 50, 90]))
        rows.append(
            {
                "row": sequence.variant.row,
                "policy": sequence.variant.policy,
                "budget": sequence.variant.budget,
                "length": options.length,
                "batch": options.batch,
                "prefill_s": median(sequence.prefill),
                "compress_s": median(sequence.compress),
                "decode_ms_per_token": {"median": middle, "p10": p10, "p90": p90, "samples": samples},
                "tokens_per_s": 1e3 * options.batch / middle,
                "kv_mib": cache_bytes(sequence.cache) / 2**20,
                "entries": cache_entries(sequence.cache),
                "kl": sequence.divergence / positions,
                "peak_mib": sequence.peak_mib,
            }
        )
    baselines = {row["row"]: row["decode_ms_per_token"]["median"] for row in rows if row["row"] in "ABC"}
    for row in rows:
        own = row["decode_ms_per_token"]["median"]
        for name in "ABC":
            row[f"ratio_to_{name.lower()}"] = baselines[name] / own if name in baselines else None
        if row["row"] == "D":
            row["break_even_tokens"] = roofline.break_even(row["compress_s"], baselines["C"], own)
    return rows


def budget(text: str) -> float | int:
    """A budget on a command line: up to 1 it is a fraction, above it is entries per row."""
    number = float(text)
    return int(number) if number > 1 and number.is_integer() else number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvpass bench``."""
    default = Options()
    parser.add_argument("--model", default=default.model, help="smollm2 or tiny-... (default: %(default)s)")
    parser.add_argument(
        "--length", type=int, action="append", help=f"tokens of the prompt; repeatable (default: {default.length})"
    )
    parser.add_argument("--batch", type=int, action="append", help="sequences; repeatable (default: 1)")
    parser.add_argument(
        "--rows",
        default=",".join(default.rows),
        help="of A,A',B,C,D: eager; torch.compile and static cache; eager and static cache; kvpass with the full "
        "cache; compressed (default: %(default)s)",
    )
    parser.add_argument(
        "--budget",
        type=budget,
        action="append",
        help="fraction of the entries, or above 1 entries per row; repeatable (default: 0.1)",
    )
    parser.add_argument("--policy", action="append", help="repeatable (default: unified)")
    parser.add_argument(
        "--steps", type=int, default=default.steps, help="timed forwards of each row (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=default.repeats,
        help="readings of each prompt (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, help="default: as torch chooses")
    parser.add_argument("--seed", type=int, default=default.seed, help="where in the text the prompts start")
    parser.add_argument("--kv-dtype", help="bf16, fp16 or fp32 for the compressed caches (default: the model's own)")
    parser.add_argument("--backend", default=default.backend, help="inductor or eager (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample and the setting")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw ms/token and MiB against length as a PNG")
    parser.add_argument("--anyway", action="store_true", help="measure, and print ratios, although the machine is busy")


def command(args: argparse.Namespace) -> int:
    """Run with parsed :func:`add_arguments` and print the table."""
    default = Options()
    options = Options(
        model=args.model,
        budgets=tuple(args.budget or default.budgets),
        policies=tuple(args.policy or default.policies),
        steps=args.steps,
        repeats=args.repeats,
        threads=args.threads,
        seed=args.seed,
        backend=args.backend,
        kv_dtype=args.kv_dtype,
        rows=tuple(args.rows.split(",")),
        anyway=args.anyway,
    )
    settings = [
        replace(options, length=length, batch=batch)
        for batch in args.batch or [default.batch]
        for length in args.length or [default.length]
    ]
    try:
        results = sweep(settings)
    except BusyError as busy:
        print(f"kvpass: {busy}", file=sys.stderr)
        return BUSY
    print("\n\n".join(table(result) for result in results))
    if args.json:
        written = results[0] if len(results) == 1 else {"runs": results}
        args.json.write_text(json.dumps(written, indent=2) + "\n")
    if args.plot:
        from kvpass.benchmarks.throughput_plot import plot

        plot(results, args.plot)
    return 0


def main(argv: list[str] | None = None) -> int:
    """``python -m kvpass.benchmarks.throughput``; the same as ``kvpass bench``."""
    from kvpass.cli import main as kvpass_main

    return kvpass_main(["bench", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    raise SystemExit(main())
