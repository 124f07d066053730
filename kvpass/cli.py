"""The ``kvpass`` command. Nothing heavy is imported before a command runs, so help is instant."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kvpass import demo, models, viewer
from kvpass.benchmarks import throughput
from kvpass.benchmarks.eval import command as evaluation

SUPPORTED, REFUSED, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code. Mistakes of the user are one sentence on standard error."""
    args = _parser().parse_args(argv)
    try:
        return args.command(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if not _expected(error):
            raise
        print(f"kvpass: {error}", file=sys.stderr)
        return BAD_USAGE


def _expected(error: Exception) -> bool:
    from kvpass import KVPassError

    return isinstance(error, (KVPassError, ValueError, OSError, ModuleNotFoundError))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvpass", description="Compile a decoder onto a compressed, physically ragged KV cache."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text, add_arguments, command in (
        ("explain", "what the compiler finds in a model, one row a layer", _explain_arguments, explain),
        (
            "demo",
            "a real model answers about a long document, at several budgets",
            demo.add_arguments,
            demo.command,
        ),
        ("bench", "decode speed, cache size and divergence", throughput.add_arguments, throughput.command),
        (
            "eval",
            "the quality that compression costs, beside other policies",
            evaluation.add_arguments,
            evaluation.command,
        ),
        ("view", "which tokens a saved cache keeps, as one static page", viewer.add_arguments, viewer.command),
    ):
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        add_arguments(sub)
        sub.set_defaults(command=command)
    return parser


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"a directory of a Hugging Face checkpoint, or one of: {', '.join(models.names())}",
    )
    parser.add_argument("--attn", choices=("sdpa", "eager"), help="default: sdpa where the model has it")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="JSON instead of a table, to FILE or standard output",
    )
    parser.add_argument(
        "--dump",
        metavar="DIR",
        help="write the graph after every pass, and each refused attention as a script that runs by itself",
    )


def explain(args: argparse.Namespace) -> int:
    """``kvpass explain``: print the report; 0 when the model can be compiled, 1 when not."""
    import kvpass
    from kvpass.passes.spec import Plan
    from kvpass.report import Report

    model = _load(args.model, args.attn)
    if args.dump:
        os.environ["KVPASS_DUMP"] = args.dump
    try:
        report = kvpass.explain(model)
    except kvpass.UnsupportedModelError as error:  # there is no graph to report on, only the reasons
        report = Report.of(Plan(captured=None, refusals=error.refusals))
    if args.json in (None, "-"):
        print(report if args.json is None else report.to_json())
    else:
        Path(args.json).write_text(report.to_json() + "\n")
    return SUPPORTED if report.supported else REFUSED


def _load(name: str, attn: str | None):
    if name in models.names():
        return models.load(name, attn=attn)[0]
    if not Path(name).is_dir():
        raise ValueError(
            f"unknown model {name!r}: neither a checkpoint's directory nor one of {', '.join(models.names())}"
        )
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(name, local_files_only=True, attn_implementation=attn).eval()
    except Exception as error:  # loaders fail in their own ways, and all of them mean the same to the user
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"cannot load a decoder from {name}: {reason}") from error
