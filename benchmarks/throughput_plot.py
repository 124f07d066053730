"""Speed and size against the prompt's length; needs matplotlib (``pip install 'kvpass[plot]'``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvpass.benchmarks.throughput_table import NAMES

_AXES = {
    "decode, ms/token (median, p10–p90)": lambda row: tuple(
        row["decode_ms_per_token"][k] for k in ("median", "p10", "p90")
    ),
    "KV cache, MiB": lambda row: (row["kv_mib"],) * 3,
}


def lines(results: Sequence[dict]) -> dict[str, list[dict]]:
    """Label of each line -> its rows by length; a line is one row, policy, budget and batch."""
    found: dict[str, list[dict]] = {}
    batches = {result["meta"]["batch"] for result in results}
    for row in (row for result in results for row in result["rows"]):
        label = NAMES[row["row"]] + (f", {row['policy']} {row['budget']:g}" if row["row"] == "D" else "")
        found.setdefault(label + (f", batch {row['batch']}" if len(batches) > 1 else ""), []).append(row)
    return {label: sorted(rows, key=lambda row: row["length"]) for label, rows in found.items()}


def plot(results: Sequence[dict], path: Path) -> None:
    """Write a PNG with ms/token and MiB, a line for each of :func:`lines`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("plots need matplotlib; get it with: pip install 'kvpass[plot]'") from missing
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axis, (title, value) in zip(figure.subplots(1, len(_AXES)), _AXES.items(), strict=True):
        for label, rows in lines(results).items():
            middle, low, high = zip(*map(value, rows), strict=True)
            errors = [
                [m - end for m, end in zip(middle, low, strict=True)],
                [end - m for m, end in zip(middle, high, strict=True)],
            ]
            axis.errorbar(
                [row["length"] for row in rows], middle, errors, marker="o", ms=3, lw=1, capsize=2, label=label
            )
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0)
        axis.set_xticks(sorted({result["meta"]["length"] for result in results}))
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    meta = results[0]["meta"]
    figure.supxlabel(f"tokens of the prompt; {meta['model']}, {meta['dtype']}, {meta['threads']} threads", fontsize=9)
    figure.savefig(path, dpi=110)
