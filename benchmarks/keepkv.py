"""What each part of KeepKV is worth: ``python -m kvpass.benchmarks.keepkv [--json FILE] [--data DIR]``.

Tables: the parts of a merge after one prefill, the settings that matter while decoding, refreshing, and speed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Literal

from torch import Tensor

from kvpass.benchmarks.keepkv_tables import table
from kvpass.kernels.entries import Entries
from kvpass.policies.keepkv import KeepKV
from kvpass.progress import bar


@dataclass(frozen=True)
class Options:
    """What to measure."""

    model: str = "smollm2"
    length: int = 1024  # of the prompts of the merges' table
    samples: int = 2
    gold: int = 64  # tokens forced after each of them
    budgets: tuple[float, ...] = (0.2, 0.1, 0.05)
    prompt: int = 512  # of the texts that are decoded
    texts: int = 2
    steps: int = 256  # forced on each of these; twice as many where refreshing is compared
    decode_budget: int = 102  # entries a row while decoding, a fifth of the prompt
    speed_at: tuple[int, ...] = (100, 1000)  # steps at which tokens/s are compared
    seed: int = 0
    data: Path | None = None  # a folder with text/*.txt, instead of Python's language reference
    threads: int = 1


@dataclass(frozen=True)
class Voted(KeepKV):
    """KeepKV with log-votes of another making: ``count`` is the logarithm of an entry's tokens, ``none`` is 0."""

    votes: Literal["count", "none"] = "count"

    def _merge(self, *given, **more) -> Entries:
        out = super()._merge(*given, **more)
        votes = out.tokens.clamp(min=1).float().log() * (self.votes == "count")
        return replace(out, log_votes=votes.masked_fill(~out.valid, -float("inf")))


PLAIN = {"value_fit": False}
MERGES: dict[str, KeepKV] = {
    "eviction, nothing merged": KeepKV(threshold=1.0, **PLAIN),
    "no votes, mean key": Voted(votes="none", **PLAIN),
    "votes only: ln(tokens), mean key": Voted(votes="count", **PLAIN),
    "ZIP key only, no votes": Voted(votes="none", key_mode="zip_strict", **PLAIN),
    "both, as published (zip_strict)": KeepKV(key_mode="zip_strict", **PLAIN),
    "zip: scale limited, rest in the vote": KeepKV(key_mode="zip", **PLAIN),
    "convex: mean key, fitted vote": KeepKV(**PLAIN),
    "fixed: target's key, fitted vote": KeepKV(key_mode="fixed", **PLAIN),
    "min_norm: exact masses by the key": KeepKV(key_mode="min_norm", **PLAIN),
    "convex, values fitted (default)": KeepKV(),
    "fixed, values fitted": KeepKV(key_mode="fixed"),
    "default, threshold 0.8": KeepKV(threshold=0.8),
    "default, gate sigma": KeepKV(gate="sigma"),
    "default, gate cost": KeepKV(gate="cost"),
    "default, merge first": KeepKV(order="merge_first"),
    "default, absorb": KeepKV(orphan="absorb"),
    "default, window queries only (R=0)": KeepKV(references=0),
}
DECODING: dict[str, KeepKV] = {
    "judge recent (default)": KeepKV(),
    **{f"judge ema, alpha {alpha}": KeepKV(judge="ema", alpha=alpha) for alpha in (0.8, 0.9, 0.95, 0.99)},
    "eviction, judge recent": KeepKV(threshold=1.0, value_fit=False),
    "w 8": KeepKV(window=8),
    "w 32": KeepKV(window=32),
    "R 64": KeepKV(references=64),
    "T 0.3": KeepKV(threshold=0.3),
    "T 0.8": KeepKV(threshold=0.8),
}
REFRESH: dict[str, int | None] = {"never": None, "64": 64, "16": 16, "256": 256}
PARTS = ("merges", "decoding", "refresh", "speed")


def run(options: Options, parts: Iterable[str] = PARTS, known: dict | None = None, progress=bar) -> Iterator[dict]:
    """``{"meta"}`` and each of ``parts``, ready for JSON, whenever there is more; ``known`` is not measured again.

    Raises:
        ValueError: an unknown model, or texts that are too short.
    """
    import torch

    from kvpass import models

    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        model, tokenizer = models.load(options.model)
        result = {"meta": _meta(options), **(known or {})}
        for part in parts:
            found = result.setdefault(part, {})
            for name, figures in _PARTS[part](model, tokenizer, options, found.keys(), progress):
                found[name] = figures
                result["meta"]["load_average"] = max(result["meta"]["load_average"], os.getloadavg()[0])
                yield result
    finally:
        torch.set_num_threads(before)


def _merges(model, tokenizer, options: Options, done, progress) -> Iterator[tuple[str, dict]]:
    """Of each sample ``{variant: {budget: KL}}``."""
    from kvpass.benchmarks.eval.compare import compare
    from kvpass.benchmarks.eval.settings import Protocol
    from kvpass.benchmarks.tasks import TASKS

    for sample in TASKS["language"](tokenizer, options.length, options.samples, options.seed, options.data):
        if sample.id not in done:
            found = defaultdict(dict)
            for row in compare(MERGES, options.budgets, [sample], model, tokenizer, Protocol(gold=options.gold)):
                found[row["policy"]][f"{row['budget']:g}"] = row["kl"]
            yield sample.id, dict(found)


def _decoding(model, tokenizer, options: Options, done, progress) -> Iterator[tuple[str, dict]]:
    plan = {name: (policy, None) for name, policy in DECODING.items()}
    yield from _forced(model, tokenizer, options, options.steps, plan, done, progress)


def _refresh(model, tokenizer, options: Options, done, progress) -> Iterator[tuple[str, dict]]:
    plan = {name: (KeepKV(), every) for name, every in REFRESH.items()}
    yield from _forced(model, tokenizer, options, 2 * options.steps, plan, done, progress)


def _forced(model, tokenizer, options: Options, steps: int, plan: dict, done, progress) -> Iterator[tuple[str, dict]]:
    """Of each variant the figures of :func:`kvpass.benchmarks.decoding.divergence`."""
    from kvpass.benchmarks import decoding

    ids = _texts(model, tokenizer, options)[:, : options.prompt + steps]
    full = decoding.predictions(model, ids, steps)
    for name, (policy, every) in plan.items():
        if name not in done:
            yield name, decoding.divergence(model, ids, full, policy, options.decode_budget, every, progress, name)


def _speed(model, tokenizer, options: Options, done, progress) -> Iterator[tuple[str, dict]]:
    from kvpass.benchmarks import decoding

    ids = _texts(model, tokenizer, options)[:1]
    ids = ids.repeat(1, 1 + (options.prompt + max(options.speed_at)) // ids.shape[1])
    given = (options.decode_budget, options.speed_at, progress)
    for judge in ("recent", "ema"):
        if judge not in done:
            yield judge, decoding.speed(model, ids, options.prompt, KeepKV(judge=judge), *given, judge)


_PARTS = {"merges": _merges, "decoding": _decoding, "refresh": _refresh, "speed": _speed}


def _texts(model, tokenizer, options: Options) -> Tensor:
    """[texts, prompt + 2 * steps] token ids of running text."""
    import torch

    from kvpass.benchmarks.tasks import TASKS, encode

    length = options.prompt + 2 * options.steps
    # Words are not tokens: windows are a little longer, and cut.
    samples = TASKS["language"](tokenizer, length + 16, options.texts, options.seed + 1, options.data)
    windows = [encode(sample, tokenizer) for sample in samples]
    rows = [[*window.context, *window.gold][:length] for window in windows]
    vocabulary = model.config.get_text_config().vocab_size
    return torch.tensor(rows) % vocabulary


def _plain(options: Options) -> dict:
    """The settings, as JSON has them."""
    source = "pydoc_data.topics" if options.data is None else "text/*.txt of --data"
    return json.loads(json.dumps(asdict(replace(options, data=None)) | {"data": source}))


def _meta(options: Options) -> dict:
    import torch

    import kvpass

    return {
        **_plain(options),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "kvpass": metadata.version(kvpass.__name__),
        "load_average": os.getloadavg()[0],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def main(argv: list[str] | None = None) -> int:
    """Run with the given command line and print the tables."""
    default = Options()
    parser = argparse.ArgumentParser(prog="python -m kvpass.benchmarks.keepkv", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=default.model, help="smollm2 or tiny-... (default: %(default)s)")
    for name in ("length", "samples", "gold", "prompt", "texts", "steps", "decode_budget", "seed", "threads"):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=getattr(default, name), help="default: %(default)s")
    parser.add_argument("--data", type=Path, help="folder with text/*.txt (default: Python's language reference)")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; repeatable")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures; a killed run goes on there")
    args = vars(parser.parse_args(argv))
    target, parts = args.pop("json"), args.pop("part") or PARTS
    options, known = Options(**args), {}
    if target and target.exists():
        known = json.loads(target.read_text())
        own = {name: value for name, value in _plain(options).items() if known["meta"].get(name) != value}
        if own:
            parser.error(f"{target} was measured with other settings than {own}")
    result = known
    for result in run(options, parts, known):
        if target:
            target.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
