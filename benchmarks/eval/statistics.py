"""Means over samples with paired bootstrap intervals, and ranks. Families of tasks are never averaged together."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from kvpass.benchmarks.eval.metrics import RANGE

RESAMPLES = 2000
LEVEL = (2.5, 97.5)  # percentiles: a 95 % interval


def interval(values: np.ndarray, draws: np.ndarray, weights: np.ndarray | None = None) -> list[float]:
    """``[mean, low, high]`` of ``values`` [n] over the resamples ``draws`` [R, n] of their indices.

    With ``weights`` [n] the mean is the ratio of sums ``sum(values) / sum(weights)``: of per-sample ratios the ones
    with small denominators would decide.
    """
    weights = np.ones_like(values) if weights is None else weights
    below = weights[draws].sum(1)
    ratios = values[draws].sum(1) / np.where(below == 0, np.nan, below)
    low, high = np.nanpercentile(ratios, LEVEL)
    return [float(values.sum() / weights.sum()), float(low), float(high)]


def summarise(rows: Sequence[dict], seed: int, few: Collection[str] = ()) -> list[dict]:
    """One entry for each family and each task, by length, budget and policy.

    Samples are resampled together for all policies, and only those that every policy was measured on count, but that
    policies in ``few`` may lack some: they have ``n`` of their own and no rank. Entries hold ``n``,
    ``[mean, low, high]`` of ``kl``, ``nll``, ``delta``, ``agreement`` and ``retention`` (None where the context is
    worth nothing), ``kl_above_best``, ``rank`` by mean KL (None, too, for policies that know the future), ``kept``
    (share of exact answers among the ``solved`` that the full cache gives exactly), and the mean bytes.
    """
    summary = []
    for by in ("family", "task"):
        groups: dict[tuple, dict[str, dict[tuple, dict]]] = {}
        for row in rows:
            cell = groups.setdefault((row[by], row["length"], row["budget"]), {})
            cell.setdefault(row["policy"], {})[row["task"], row["id"]] = row
        for (name, length, budget), cell in groups.items():
            head = {"by": by, "group": name, "length": length, "budget": budget}
            summary += [head | entry for entry in _entries(cell, seed, few)]
    return summary


def _entries(cell: dict[str, dict[tuple, dict]], seed: int, few: Collection[str]) -> list[dict]:
    whole = {policy: own for policy, own in cell.items() if policy not in few} or cell
    shared = [key for key in next(iter(whole.values())) if all(key in own for own in whole.values())]
    if not shared:
        return []
    columns = {policy: [own[key] for key in shared if key in own] for policy, own in cell.items()}
    columns = {policy: own for policy, own in columns.items() if own}
    kl = {policy: {(row["task"], row["id"]): row["kl"] for row in own} for policy, own in columns.items()}
    mean = {policy: np.mean([*own.values()]) for policy, own in kl.items()}
    rivals = [policy for policy, own in columns.items() if len(own) == len(shared) and not own[0]["future"]]
    best = min(rivals or columns, key=mean.get)
    entries = []
    for policy, own in columns.items():
        draws = np.random.default_rng(seed).integers(0, len(own), (RESAMPLES, len(own)))
        above = np.array([value - kl[best][key] for key, value in kl[policy].items() if key in kl[best]])
        rank = 1 + sum(bool(mean[rival] < mean[policy]) for rival in rivals) if policy in rivals else None
        entries.append(
            {"policy": policy, "n": len(own), "rank": rank, "best": best}
            | {name: interval(_column(own, name), draws) for name in ("kl", "nll", "delta", "agreement")}
            | {"kl_above_best": interval(above, draws), "retention": _retention(own, draws)}
            | _answers(own)
            | {name: float(_column(own, name).mean()) for name in ("entries", "bytes", "bytes_full", "nll_full")}
        )
    return entries


def _column(rows: Sequence[dict], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in rows])


def _retention(rows: Sequence[dict], draws: np.ndarray) -> list[float] | None:
    """1 - (what compression costs) / (what the context is worth), both summed over the samples."""
    worth = _column(rows, "nll_without") - _column(rows, "nll_full")
    if worth.mean() < RANGE:
        return None
    return interval(worth - _column(rows, "delta"), draws, worth)


def _answers(rows: Sequence[dict]) -> dict:
    solved = [row for row in rows if row["exact_full"]]
    kept = float(np.mean([row["exact"] for row in solved])) if solved else None
    scored = [row for row in rows if row.get("score") is not None]
    means = {f"mean_{name}": float(_column(scored, name).mean()) for name in ("score", "score_full") if scored}
    return {"solved": len(solved), "kept": kept} | means
