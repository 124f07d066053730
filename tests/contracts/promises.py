"""The README's table of promises, made from the first sentence of every contract test."""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).parent
README = HERE.parent.parent / "README.md"
BEGIN, END = "<!-- promises -->", "<!-- /promises -->"


def table() -> str:
    """One line a promise, grouped by file."""
    lines = ["| | what holds, each line a test |", "|---|---|"]
    for path in sorted(HERE.glob("test_*.py")):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                promise = " ".join((ast.get_docstring(node) or "").split())
                lines.append(f"| {path.stem.removeprefix('test_')} | {promise.replace('|', '/')} |")
    return "\n".join(lines)


def updated(text: str) -> str:
    """``text`` with the table between its markers renewed."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
