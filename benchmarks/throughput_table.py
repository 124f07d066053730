"""The table of ``kvpass bench``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tabulate import tabulate

LOAD_LIMIT = 1.5  # a busier machine times its other work
DRIFT_LIMIT = 0.10  # of the read bandwidth before and after decoding
TURN = 4  # forwards of one variant before the next has its turn

NAMES = {
    "A": "A untouched, eager",
    "A'": "A' torch.compile, static cache",
    "B": "B eager, static cache",
    "C": "C kvpass, all kept",
    "D": "D kvpass",
}
_RATIOS = ("speed\n× A", "speed\n× B", "speed\n× C", "of its\nroofline", "break-even\ntokens")


def _percent(row: dict) -> str | None:
    return None if row.get("of_roofline") is None else f"{row['of_roofline']:.0%}"


def _tokens(row: dict) -> str | None:
    if "break_even_tokens" not in row:
        return None
    return "never" if row["break_even_tokens"] is None else f"{row['break_even_tokens']:.0f}"


_COLUMNS: dict[str, tuple[Callable[[dict], Any], str]] = {  # head -> value of a row, format
    "row": (lambda row: NAMES[row["row"]], ""),
    "policy": (lambda row: row["policy"] if row["row"] == "D" else "", ""),
    "budget": (lambda row: "" if row["budget"] is None else f"{row['budget']:g}", ""),
    "prefill\ns": (lambda row: row["prefill_s"], ".2f"),
    "compress\ns": (lambda row: row["compress_s"], ".2f"),
    "decode\nms/token": (lambda row: row["decode_ms_per_token"]["median"], ".1f"),
    "p10–p90\nms/token": (lambda row: "{p10:.1f}–{p90:.1f}".format(**row["decode_ms_per_token"]), ""),
    "decode\ntokens/s": (lambda row: row["tokens_per_s"], ".1f"),
    "speed\n× A": (lambda row: row["ratio_to_a"], ".2f"),
    "speed\n× B": (lambda row: row.get("ratio_to_b"), ".2f"),
    "speed\n× C": (lambda row: row["ratio_to_c"], ".2f"),
    "of its\nroofline": (_percent, ""),
    "break-even\ntokens": (_tokens, ""),
    "prefill adds\nMiB at peak": (lambda row: row.get("peak_mib"), ".0f"),
    "KV cache\nMiB": (lambda row: row["kv_mib"], ".1f"),
    "KV cache\nentries": (lambda row: row["entries"], "d"),
    "KL to A\nnats": (lambda row: row["kl"], ".2g"),
}


def distrust(meta: dict) -> str:
    """Why times must not be compared, or an empty string."""
    before, after = meta.get("read_gb_per_s") or (None, None)
    if meta["load_average"] > LOAD_LIMIT:
        return f"the machine was busy (load average {meta['load_average']:.1f})"
    if before and after and abs(before - after) > DRIFT_LIMIT * max(before, after):
        return f"memory was read at {before:.1f} GB/s before decoding and at {after:.1f} after"
    return ""


def table(result: dict) -> str:
    """The rows with units, and under them the setting in one sentence.

    Where :func:`distrust` has a reason there are no ratios, unless they were asked for anyway.
    """
    meta, rows = result["meta"], result["rows"]
    reason = distrust(meta)
    hidden = () if meta["anyway"] or not reason else _RATIOS
    columns = {head: column for head, column in _COLUMNS.items() if head not in hidden}
    columns = {
        head: (value, form) for head, (value, form) in columns.items() if any(value(r) is not None for r in rows)
    }
    cells = [[value(row) for value, _ in columns.values()] for row in rows]
    texts = [index for index, (_, form) in enumerate(columns.values()) if not form and index]
    formats = [form or "g" for _, form in columns.values()]
    lines = [
        tabulate(cells, list(columns), floatfmt=formats, disable_numparse=texts),
        f"{meta['model']}, {meta['dtype']}, prompt of {meta['length']} tokens, batch {meta['batch']}, "
        f"{meta['threads']} threads; decode is the median over {meta['steps']} forwards in turns of {TURN}, "
        f"spread is p10–p90; KL is the mean over the same {meta['forced_positions']} forced positions.",
    ]
    if all(meta.get("read_gb_per_s") or [None]) and (first := rows[0]).get("weight_mib"):
        before, after = meta["read_gb_per_s"]
        lines.append(
            f"A step reads {first['weight_mib']:.0f} MiB of weights and the row's KV entries; the roofline is reading "
            f"them at {(before + after) / 2:.1f} GB/s, measured in this process before ({before:.1f}) and after "
            f"({after:.1f}) decoding."
        )
    if hidden:
        lines.append(f"No ratios: {reason}; --anyway prints them.")
    elif reason:
        lines.append(f"{reason[0].upper()}{reason[1:]}: do not trust times and ratios.")
    return "\n".join(lines)
