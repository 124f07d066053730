"""Quality against budget, one line a policy; needs matplotlib (``pip install 'kvpass[plot]'``)."""

from __future__ import annotations

from pathlib import Path

from kvpass.benchmarks.eval.tables import FIGURES, groups

MARKERS = "os^DvPX"
DASHES = ("-", "--", ":")
WORST = -1.0  # retention below it is cut off: what destroys the output would hide all the others


def plot(result: dict, path: Path) -> None:
    """Write a PNG: a row for each family and length, a column for each figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: the result has no rows.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("plots need matplotlib; get it with: pip install 'kvpass[plot]'") from missing
    found = groups(result, "family")
    if not found:
        raise ValueError("there is nothing to plot")
    figure = Figure(figsize=(6.5 * len(FIGURES), 4.2 * len(found)), layout="constrained")
    axes = figure.subplots(len(found), len(FIGURES), squeeze=False)
    for line, ((group, length), entries) in zip(axes, found.items(), strict=True):
        for axis, name in zip(line, FIGURES, strict=True):
            _lines(axis, entries, name)
            axis.set_title(f"{group}, {length} tokens, n = {entries[0]['n']}", fontsize=10)
            axis.set_ylabel("KL, nats a token" if name == "kl" else name)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.supxlabel(
        f"budget; {result['meta']['settings']['model']}, question-{result['meta']['protocol']}", fontsize=9
    )
    figure.savefig(path, dpi=110)


def _lines(axis, entries: list[dict], name: str) -> None:
    for at, policy in enumerate(dict.fromkeys(entry["policy"] for entry in entries)):
        own = sorted((e for e in entries if e["policy"] == policy and e[name]), key=lambda entry: entry["budget"])
        if own:
            budgets = [entry["budget"] for entry in own]
            middle = [entry[name][0] for entry in own]
            errors = [[abs(entry[name][0] - entry[name][end]) for entry in own] for end in (1, 2)]
            style = MARKERS[at % len(MARKERS)] + DASHES[at // len(MARKERS) % len(DASHES)]
            axis.errorbar(budgets, middle, errors, fmt=style, color=f"C{at % 10}", label=policy, ms=3, lw=1, capsize=2)
    axis.set_xscale("log")
    if name == "kl" and any(entry["kl"][0] > 0 for entry in entries):
        axis.set_yscale("log")
    if name == "retention":
        axis.set_ylim(bottom=max(WORST, axis.get_ylim()[0]))
    budgets = sorted({entry["budget"] for entry in entries})
    axis.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    axis.minorticks_off()
