"""JSON lines and their fields, refused in one sentence with the line's number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

MOST_BYTES = 64 * 2**20  # of one line


def data_file(task: str, data: Path | None, *names: str) -> Path:
    """The first of ``names`` that is a file in ``data``; ValueError where there is none."""
    found = [data / name for name in names if data is not None and (data / name).is_file()]
    if not found:
        raise ValueError(f"{task}: needs {' or '.join(names)} in the folder of data, and there is none")
    return found[0]


def rows(path: Path) -> Iterator[tuple[str, dict]]:
    """``(where, row)`` for every line that is not blank; ``where`` names file and line.

    Text is kept as it is, apart from lone surrogates, which no tokenizer takes and which become question marks.
    """
    with path.open("rb") as file:
        for number in range(1, 2**63):
            where = f"{path.name}, line {number}"
            line = file.readline(MOST_BYTES + 1)
            if not line:
                return
            if len(line) > MOST_BYTES:
                raise ValueError(f"{where}: is longer than {MOST_BYTES // 2**20} MB")
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: is not JSON ({error})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where}: is not an object with fields")
            yield where, row


def text(row: dict, field: str, where: str, default: str | None = None) -> str:
    """The row's field, which is text and not empty of everything unless it has a default."""
    value = row.get(field, default)
    if not isinstance(value, str):
        raise ValueError(f"{where}: {field!r} " + ("is missing" if field not in row else "is not text"))
    return _clean(value)


def texts(row: dict, field: str, where: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """The row's field, which is a list of texts."""
    value = row.get(field, default)
    if value is None and field not in row:
        raise ValueError(f"{where}: {field!r} is missing")
    if not (isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value)):
        raise ValueError(f"{where}: {field!r} is not a list of texts")
    return tuple(_clean(part) for part in value)


def _clean(value: str) -> str:
    return value.encode("utf-8", "replace").decode("utf-8")
