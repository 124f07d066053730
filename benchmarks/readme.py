"""The README's tables, rendered from the committed results: ``python -m kvpass.benchmarks.readme`` renews them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from kvpass import demo
from kvpass.benchmarks import coverage, keepkv_tables, throughput
from kvpass.benchmarks.eval import tables

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
WIDTH = 110


def _demo() -> str:
    return demo.render(json.loads((HERE / "results" / "demo.json").read_text()), WIDTH)


def _throughput() -> str:
    return throughput.table(json.loads((HERE / "results" / "throughput_8192.json").read_text()))


_SHOWN = {  # of each result, the tables whose first line begins so; the JSON beside this file has all
    "language": r"language, \d+ tokens, \d+ samples: KL",
    "needles": r"retrieval, \d+ tokens(, \d+ samples: share|: answers)",
    "agnostic": r"retrieval, \d+ tokens, \d+ samples: share",
}


def _quality() -> str:
    shown = []
    for name, head in _SHOWN.items():
        parts = tables.tables(json.loads((HERE / "results" / f"eval_{name}.json").read_text())).split("\n\n")
        shown += [*(part for part in parts if re.match(head, part)), parts[-1]]
    return "\n\n".join(shown)


def _keepkv() -> str:
    return keepkv_tables.table(json.loads((HERE / "results" / "keepkv.json").read_text()))


def _coverage() -> str:
    return coverage.section(coverage.read())


def _block(render) -> Callable[[], str]:
    return lambda: f"```\n{render()}\n```"


SECTIONS = {
    "demo": _block(_demo),
    "throughput": _block(_throughput),
    "quality": _block(_quality),
    "keepkv": _block(_keepkv),
    "coverage": _coverage,
}


def updated(text: str) -> str:
    """``text`` with every section between its markers rendered anew."""
    for name, render in SECTIONS.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{render()}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
