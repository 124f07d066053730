"""The tables of :mod:`kvpass.benchmarks.keepkv`, from its JSON."""

from __future__ import annotations

from statistics import mean

from kvpass.benchmarks.decoding import AROUND
from kvpass.benchmarks.throughput import LOAD_LIMIT


def table(result: dict) -> str:
    """The tables of the parts that were measured, as text."""
    meta = result["meta"]
    lines = [f"KL to the full cache, nats a token: mean (least–most) of texts; {meta['model']}, fp32, {meta['data']}"]
    lines += [_TABLES[part](result[part], meta) for part in _TABLES if result.get(part)]
    if meta["load_average"] > LOAD_LIMIT:
        lines.append(f"\nThe machine was busy (load average up to {meta['load_average']:.1f}): do not trust tokens/s.")
    return "\n".join(lines)


def _table(rows: list, heads: list, said: str) -> str:
    from tabulate import tabulate

    return "\n".join(["", said, tabulate(rows, heads, disable_numparse=True)])


def _merges_table(found: dict, meta: dict) -> str:
    budgets = [f"{budget:g}" for budget in meta["budgets"]]
    names = next(iter(found.values()))
    rows = [[name, *(_spread([own[name][budget] for own in found.values()]) for budget in budgets)] for name in names]
    said = f"after one prefill of {meta['length']} tokens, {len(found)} texts, {meta['gold']} forced tokens each"
    return _table(rows, ["a merge", *(f"budget {budget}" for budget in budgets)], said)


def _held(meta: dict) -> str:
    return f"{meta['texts']} texts, prompt {meta['prompt']}, {meta['decode_budget']} entries a row while decoding"


def _decoding_table(found: dict, meta: dict) -> str:
    rows = [[name, _spread(own["texts"]), _share(own)] for name, own in found.items()]
    said = f"while decoding: {meta['steps']} forced tokens, {_held(meta)}"
    return _table(rows, ["KeepKV", "KL", "maintenance %"], said)


def _refresh_table(found: dict, meta: dict) -> str:
    rows = [
        [name, _spread(own["texts"]), *(f"{part:.3f}" for part in own["quarters"]), _share(own)]
        for name, own in found.items()
    ]
    said = f"refreshing: {2 * meta['steps']} forced tokens, {_held(meta)}; KL of each quarter"
    return _table(rows, ["every", "KL", "1st", "2nd", "3rd", "4th", "maintenance %"], said)


def _speed_table(found: dict, meta: dict) -> str:
    at = [str(step) for step in meta["speed_at"]]
    rows = [
        [judge, *(f"{own['tokens_per_s'][step]:.1f}" for step in at), f"{100 * own['maintain_share']:.1f}"]
        for judge, own in found.items()
    ]
    said = f"speed: eager, {meta['threads']} thread, means over the {AROUND} steps before the given one"
    return _table(rows, ["judge", *(f"tokens/s at {step}" for step in at), "maintenance %"], said)


_TABLES = {
    "merges": _merges_table,
    "decoding": _decoding_table,
    "refresh": _refresh_table,
    "speed": _speed_table,
}


def _spread(values: list[float]) -> str:
    return f"{mean(values):.3f} ({min(values):.3f}–{max(values):.3f})"


def _share(row: dict) -> str:
    return f"{100 * row['maintain_s'] / (row['maintain_s'] + row['decode_s']):.1f}"
