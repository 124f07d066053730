"""A result as text: one table a family, length and figure; never an average over families."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from tabulate import tabulate

FIGURES: dict[str, str] = {  # of a summary's entry -> head
    "kl": "KL to the full cache, nats a token (lower is better)",
    "retention": "share of what the context is worth that is kept (1 = lossless, 0 = as without context)",
}


def tables(result: dict, by: str = "family") -> str:
    """Every family (or ``by="task"`` every task), and under all of them what was measured and how."""
    shown = [part for figure in FIGURES for part in _figure_tables(result, by, figure)]
    if not shown:
        shown = ["nothing was measured"]
    return "\n\n".join([*shown, *_answer_tables(result, by), _footer(result)])


def groups(result: dict, by: str) -> dict[tuple[str, int], list[dict]]:
    """Entries of the summary by (group, length), in order."""
    found: dict[tuple[str, int], list[dict]] = {}
    for entry in result["summary"]:
        if entry["by"] == by:
            found.setdefault((entry["group"], entry["length"]), []).append(entry)
    return found


def _figure_tables(result: dict, by: str, figure: str) -> Iterator[str]:
    for (group, length), entries in groups(result, by).items():
        if all(entry[figure] is None for entry in entries):
            continue
        title = f"{group}, {length} tokens, {_most(entries)['n']} samples: {FIGURES[figure]}"
        yield title + "\n" + _grid(entries, lambda entry, figure=figure: _cell(entry, figure))


def _most(entries: Sequence[dict]) -> dict:
    """An entry of all samples."""
    return max(entries, key=lambda entry: entry["n"])


def _grid(entries: Sequence[dict], cell: Callable[[dict], str]) -> str:
    """Policies down, budgets across; the best mean rank first, policies without a rank last."""
    budgets = list(dict.fromkeys(entry["budget"] for entry in entries))
    policies = dict.fromkeys(entry["policy"] for entry in entries)
    ranks = {name: [entry["rank"] for entry in entries if entry["policy"] == name] for name in policies}

    def place(name: str) -> float:
        known = [rank for rank in ranks[name] if rank is not None]
        return sum(known) / len(known) if known else float("inf")

    at = {(entry["policy"], entry["budget"]): entry for entry in entries}
    count = {entry["policy"]: entry["n"] for entry in entries}
    said = {name: f" ({count[name]} samples)" if count[name] < _most(entries)["n"] else "" for name in policies}
    lines = [
        [name + said[name], *(cell(at[name, budget]) if (name, budget) in at else "" for budget in budgets)]
        for name in sorted(policies, key=place)
    ]
    return tabulate(lines, ["policy", *(f"budget {budget:g}" for budget in budgets)], disable_numparse=True)


def _cell(entry: dict, figure: str) -> str:
    if entry[figure] is None:
        return "–"
    mean, low, high = entry[figure]
    text = f"{mean:.3g} [{low:.3g}, {high:.3g}]"
    if figure != "kl" or entry["rank"] is None:
        return text
    return f"{text} {'=' if entry['kl_above_best'][1] <= 0 and entry['rank'] > 1 else ' '}{entry['rank']:<2d}"


def _answer_tables(result: dict, by: str) -> Iterator[str]:
    for (group, length), entries in groups(result, by).items():
        if group == "language" or all(entry["group"] == "pydoc" for entry in entries):
            continue
        solved, count = (_most(entries)[name] for name in ("solved", "n"))
        title = f"{group}, {length} tokens: answers kept word for word"
        if not solved:
            yield f"{title}: the full cache gives none of {count}, so there is nothing to keep"
            continue
        title += f", of the {solved} of {count} that the full cache gives"
        yield title + "\n" + _grid(entries, lambda entry: _kept(entry) + _score(entry))


def _kept(entry: dict) -> str:
    return "–" if entry["kept"] is None else f"{100 * entry['kept']:.0f} %"


def _score(entry: dict) -> str:
    if "mean_score" not in entry:
        return ""
    return f" (score {entry['mean_score']:.2f}, full {entry['mean_score_full']:.2f})"


def _footer(result: dict) -> str:
    meta = result["meta"]
    settings = meta["settings"]
    lines = [
        f"{settings['model']}, {meta['dtype']}, question-{meta['protocol']}; seed {settings['seed']}.",
        "[95 % interval of 2,000 paired resamples of the samples], rank by mean KL; = not told apart from the best;",
        "policies without a rank know the future, or were measured on fewer samples.",
        "Task scores of this model are not comparable with published ones.",
    ]
    for budget in settings["budgets"]:
        stored = [entry for entry in result["summary"] if entry["budget"] == budget and entry["by"] == "family"]
        if stored:
            shares = [100 * entry["bytes"] / entry["bytes_full"] for entry in stored]
            lines.append(f"budget {budget:g}: {min(shares):.1f}–{max(shares):.1f} % of the full cache's bytes")
    for reason, count in Counter(sample["skipped"] for sample in result["skipped"]).items():
        lines.append(f"{count} samples skipped: {reason}")
    return "\n".join(lines)
