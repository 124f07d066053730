"""The README's tables, rendered from the committed results: ``python -m kvpass.benchmarks.readme`` renews them."""

from __future__ import annotations

import json
from pathlib import Path

from tabulate import tabulate

from kvpass import demo
from kvpass.benchmarks import throughput

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
WIDTH = 110


def _demo() -> str:
    return demo.render(json.loads((HERE / "results" / "demo.json").read_text()), WIDTH)


def _throughput() -> str:
    return throughput.table(json.loads((HERE / "results" / "throughput_8192.json").read_text()))


def _quality() -> str:
    result = json.loads((HERE / "results" / "quality_4096.json").read_text())
    meta = result["meta"]
    note = (
        f"{meta['model']}, {meta['dtype']}, budget {meta['budget']}: {meta['measure']}, over {meta['forced_tokens']} "
        f"forced tokens after {meta['prompt_tokens']}; one window a text, so no spread"
    )
    return tabulate(result["rows"], headers="keys", floatfmt=".3f") + "\n" + note


SECTIONS = {"demo": _demo, "throughput": _throughput, "quality": _quality}


def updated(text: str) -> str:
    """``text`` with every section between its markers rendered anew."""
    for name, render in SECTIONS.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n```\n{render()}\n```\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
