"""``kvpass eval``: measure, resume, print the tables, write the JSON and the plot."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvpass.benchmarks.eval.settings import Protocol, Settings
from kvpass.benchmarks.throughput import budget

OUT = Path("kvpass-eval")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvpass eval``."""
    default = Settings()
    for flag, kind, text in (
        ("--policy", str, "repeatable (default: every registered policy)"),
        ("--budget", budget, f"fraction, or above 1 entries per row; repeatable (default: {_list(default.budgets)})"),
        ("--task", str, f"repeatable (default: {_list(default.tasks)})"),
        ("--length", int, f"tokens of the prompts; repeatable (default: {_list(default.lengths)})"),
        ("--samples", int, f"of each task at each length; repeated: one a length (default: {_list(default.samples)})"),
    ):
        parser.add_argument(flag, type=kind, action="append", help=text)
    parser.add_argument("--model", default=default.model, help="a name or a checkpoint's directory (default: smollm2)")
    parser.add_argument(
        "--few",
        type=_few,
        action="append",
        metavar="POLICY=N",
        help="measure a slow policy on N samples of each family at each length only, its tasks in turn; repeatable",
    )
    parser.add_argument("--minutes", type=float, help="begin no sample after them, and say how many were not reached")
    parser.add_argument(
        "--protocol",
        choices=("aware", "agnostic"),
        default="aware",
        help="whether the policy sees the question before it compresses (default: %(default)s)",
    )
    parser.add_argument(
        "--free",
        choices=("ends", "none"),
        default="ends",
        help="what is exact and not charged to the budget: prefix and question, or nothing (default: %(default)s)",
    )
    parser.add_argument(
        "--gold", type=int, default=default.protocol.gold, help="forced tokens, at most (default: %(default)s)"
    )
    parser.add_argument("--generate", action="store_true", help="also decode greedily and score with the task's metric")
    parser.add_argument("--attention", action="store_true", help="also the error of each layer's attention output")
    parser.add_argument("--seed", type=int, default=default.seed, help="of the samples (default: %(default)s)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", type=Path, metavar="DIR", help="data files; without them tasks are generated")
    source.add_argument(
        "--jsonl", type=Path, metavar="FILE", help='own lines of {"context", "question", "answers"}, instead of tasks'
    )
    parser.add_argument(
        "--jobs", type=int, default=default.jobs, help="processes with one thread each (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, help="directory; a killed run goes on there (default: %(default)s)"
    )
    parser.add_argument(
        "--by", choices=("family", "task"), default="family", help="tables (default: a %(default)s each)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--plot", action="store_true", help="write quality.png too (needs matplotlib)")


def command(args: argparse.Namespace) -> int:
    """Run with parsed :func:`add_arguments`; ``result.json`` and ``table.txt`` are written beside the shards."""
    default = Settings()
    settings = Settings(
        model=args.model,
        policies=tuple(args.policy or ()),
        budgets=tuple(args.budget or default.budgets),
        tasks=tuple(args.task or default.tasks),
        lengths=tuple(args.length or default.lengths),
        samples=tuple(args.samples or default.samples),
        few=tuple(args.few or ()),
        minutes=args.minutes,
        seed=args.seed,
        data=args.data,
        jsonl=args.jsonl,
        jobs=args.jobs,
        protocol=Protocol(args.protocol == "aware", args.free == "ends", args.gold, args.generate, args.attention),
    )
    from kvpass.benchmarks.eval import runner, tables

    args.out.mkdir(parents=True, exist_ok=True)
    result = runner.run(settings, args.out)
    text = json.dumps(result, indent=1, allow_nan=False)
    (args.out / "result.json").write_text(text + "\n", encoding="utf-8")
    shown = tables.tables(result, args.by)
    (args.out / "table.txt").write_text(shown + "\n", encoding="utf-8")
    if args.plot:
        from kvpass.benchmarks.eval.plot import plot

        plot(result, args.out / "quality.png")
    print(text if args.json else shown)
    return 0


def _few(text: str) -> tuple[str, int]:
    """``("h2o", 4)`` of "h2o=4"."""
    policy, _, count = text.partition("=")
    if not count.isdecimal():
        raise argparse.ArgumentTypeError(f"expected POLICY=N, got {text!r}")
    return policy, int(count)


def _list(values) -> str:
    return ", ".join(str(value) for value in values)
