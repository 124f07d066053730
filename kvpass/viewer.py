"""``kvpass view``: which tokens a saved cache keeps, row by row, as one static page without network access."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import math
from pathlib import Path

TEMPLATE = Path(__file__).with_name("viewer.html")
_SMALLEST = -99.0  # log-vote shown for an entry that has no weight at all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``kvpass view``."""
    parser.add_argument("cache", type=Path, metavar="CACHE", help="a file that cache.save() wrote")
    parser.add_argument("-o", "--output", type=Path, default=Path("view.html"), metavar="FILE", help="%(default)s")
    parser.add_argument(
        "--pieces",
        type=Path,
        metavar="FILE",
        help="JSON: for each sequence the list of its tokens' texts, for a cache saved without them",
    )


def command(args: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    pieces = None
    if args.pieces is not None:
        try:
            pieces = json.loads(args.pieces.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{args.pieces}: is not JSON ({error})") from None
    args.output.write_text(page(allocation(args.cache, pieces)), encoding="utf-8")
    print(f"wrote {args.output}, {args.output.stat().st_size / 2**20:.1f} MiB")
    return 0


def allocation(path: Path, pieces: list[list[str]] | None = None) -> dict:
    """What a saved cache keeps, as plain numbers and texts.

    ``rows[layer][sequence][head]`` is ``{"exact": [positions], "other": [[position, tokens, log-vote], …]}``: tokens
    kept as they were, and entries that stand for several tokens or whose vote is not one. ``seen[sequence]`` counts
    tokens, ``windows[layer]`` is 0 for full attention, ``pieces[sequence]`` are the tokens' texts, empty if unknown.

    Raises:
        CacheError: the file is no saved cache.
        ValueError: ``pieces`` are not a list of texts for each sequence, at least as many as it has tokens.
    """
    from kvpass.saved import read

    facts, tensors = read(path)
    seen = tensors["seen"].tolist()
    pieces = pieces if pieces is not None else facts.get("pieces")
    windows = [layer["window"] for layer in facts["layers"]]
    return {
        "seen": seen,
        "windows": windows,
        "rows": [_layer(tensors, index, window, seen) for index, window in enumerate(windows)],
        "pieces": _checked(pieces, seen) if pieces is not None else [[] for _ in seen],
    }


def page(found: dict) -> str:
    """One HTML page of an :func:`allocation`. Texts reach it as JSON in a data block and are only ever set as text."""
    template = TEMPLATE.read_text(encoding="utf-8")
    before, rest = template.split("<script>")
    code, after = rest.split("</script>")
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    # A data block ends at the next "</script"; without "<" in the JSON there is none.
    data = json.dumps(found, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    block = f'<script type="application/json" id="data">{data}</script>\n'
    return before.replace("CONTENT-SECURITY-POLICY", policy) + block + f"<script>{code}</script>" + after


def _checked(pieces, seen: list[int]) -> list[list[str]]:
    rows = pieces if isinstance(pieces, list) and len(pieces) == len(seen) else [None]
    if not all(isinstance(row, list) and all(isinstance(piece, str) for piece in row) for row in rows):
        raise ValueError(f"the tokens' texts are not {len(seen)} lists of texts, one for each sequence of the cache")
    for row, tokens in zip(rows, seen, strict=True):
        if len(row) < tokens:
            raise ValueError(
                f"the cache has seen {tokens} tokens of a sequence, of which only {len(row)} texts are given"
            )
    return [row[:tokens] for row, tokens in zip(rows, seen, strict=True)]


def _layer(tensors: dict, index: int, window: int, seen: list[int]) -> list[list[dict]]:
    start, length = tensors[f"{index}.row_start"].tolist(), tensors[f"{index}.row_len"].tolist()
    fields = [tensors[f"{index}.{name}"].tolist() for name in ("pos", "tokens", "log_votes")]
    tail = tensors[f"tail.{window}.pos"].tolist()
    result = []
    for row, tokens in enumerate(seen):
        oldest = tokens - window if window else 0
        recent = sorted(pos for pos in tail[row] if pos >= max(oldest, 0))
        heads = []
        for begin, count in zip(start[row], length[row], strict=True):
            entries = list(zip(*(field[begin : begin + count] for field in fields), strict=True))
            plain = [pos for pos, size, vote in entries if size == 1 and vote == 0]
            other = [
                [pos, size, round(max(vote, _SMALLEST), 3) if not math.isnan(vote) else _SMALLEST]
                for pos, size, vote in entries
                if size != 1 or vote != 0
            ]
            heads.append({"exact": plain + recent, "other": other})
        result.append(heads)
    return result
