"""Which decoders compile: every row of the zoo checked, and every other family of the installed transformers tried.

``python -m kvpass.benchmarks.coverage`` renews ``results/coverage.json``, the data behind the README's table; the test
of the zoo runs the same :func:`check` and compares.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from fractions import Fraction
from pathlib import Path

import torch

import kvpass
from kvpass.models.tiny import build
from kvpass.models.zoo import BOTH, ZOO, Row

RESULTS = Path(__file__).parent / "results" / "coverage.json"
PROMPT, PADDED, NEW, BUDGET = 40, 5, 24, "0.3"

STATUSES = ("identical", "differs", "fails", "refused", "not built")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one row does under one attention implementation."""

    row: str
    family: str
    attn: str
    status: str  # one of STATUSES
    layers: tuple[str, ...] = ()  # "heads, scale; mask" of every attention, in graph order
    reason: str = ""


def check(row: Row, attn: str) -> Outcome:
    """Build a row and hold its compiled twin against it.

    `identical`: every attention was found and its mask classified; at budget 1.0 a batch of two 40-token prompts, one
    padded on the left, gives the untouched model's 24 greedy tokens; at budget 0.3 the entries are within budget,
    logits finite and the first token is the untouched model's. `refused`: the model is as it was before.
    """
    outcome = Outcome(row.name, row.model_type, attn, "not built")
    try:
        model = build(row, attn)
        if row.name not in ZOO:
            _run(model)
    except Exception as error:  # a newer family's configuration may need sizes of its own
        return dataclasses.replace(outcome, reason=_sentence(error))
    before = _fingerprint(model)
    try:
        exact = kvpass.compile(model, budget=1.0, backend="eager")
        found = tuple(f"{r.attention}; {r.mask}" for r in exact.kvpass.plan.rows if r.status == "found")
        fault = _fault(row, model, exact, len(found))
    except kvpass.UnsupportedModelError as error:
        reasons = dict.fromkeys(f"{refusal.layer}: {refusal.reason}" for refusal in error.refusals)
        changed = "" if _fingerprint(model) == before else "; and the model was changed"
        return dataclasses.replace(outcome, status="refused", reason="; ".join(reasons) + changed)
    except Exception as error:  # a defect, which one line of a report should show
        return dataclasses.replace(outcome, status="fails", reason=_sentence(error))
    return dataclasses.replace(outcome, status="differs" if fault else "identical", layers=found, reason=fault)


def _run(model) -> None:
    ids, mask = _prompt()
    with torch.no_grad():
        model(ids, attention_mask=mask, use_cache=False)


def attempt(family: str) -> Outcome:
    """A family without a row, with the common sizes, in the first attention implementation that it builds with."""
    outcomes = (check(Row(family), attn) for attn in BOTH)
    return next((outcome for outcome in outcomes if outcome.status != "not built"), None) or check(Row(family), BOTH[0])


def _fault(row: Row, model, exact, found: int) -> str:
    """The first thing that does not hold, empty if all does."""
    layers = row.attentions or model.config.num_hidden_layers
    if found != layers:
        return f"{found} attentions found, {layers} expected"
    ids, mask = _prompt()
    with torch.no_grad():
        expected = _greedy(model, ids, mask, NEW).sequences
        if not torch.equal(_greedy(exact, ids, mask, NEW).sequences, expected):
            return "greedy tokens differ at budget 1.0"
        cut = kvpass.compile(model, budget=float(BUDGET), backend="eager")
        cache = cut.kvpass.new_cache()
        cut(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        if (stored := _full_entries(cache)) > (allowed := _allowed(cache, mask)):
            return f"{stored} entries stored at budget {BUDGET}, {allowed} allowed"
        short = _greedy(cut, ids, mask, 4)
        if not all(bool(logits.isfinite().all()) for logits in short.logits):
            return f"logits are not finite at budget {BUDGET}"
        if not torch.equal(short.sequences[:, PROMPT], expected[:, PROMPT]):
            return f"the first token differs at budget {BUDGET}"
    return ""


def _prompt() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 100, (2, PROMPT), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :PADDED] = 0
    return ids, mask


def _greedy(model, ids, mask, steps: int):
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=steps,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )


def _full_entries(cache) -> int:
    pairs = zip(cache.specs, cache.lengths(), strict=True)
    return sum(int(lengths.sum()) for layer, lengths in pairs if not layer.window)


def _allowed(cache, mask) -> int:
    heads = sum(layer.kv_heads for layer in cache.specs if not layer.window)
    return sum(max(heads, int(Fraction(BUDGET) * int(tokens) * heads)) for tokens in mask.sum(1))


def _fingerprint(model) -> tuple:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    versions = tuple((name, id(tensor), tensor._version) for name, tensor in tensors)
    return (*vars(model), *vars(model.forward.__func__), model.training, versions)


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def untabled() -> tuple[str, ...]:
    """Families in the installed transformers' causal-LM mapping that have no row, in its order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = {row.model_type for row in ZOO.values()}
    return tuple(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in known)


def read(path: Path = RESULTS) -> dict:
    """The committed results: versions, then outcomes as written by :func:`write`."""
    data = json.loads(path.read_text())
    for kind in ("rows", "tried"):
        data[kind] = [Outcome(**{**entry, "layers": tuple(entry["layers"])}) for entry in data[kind]]
    return data


def write(rows: list[Outcome], tried: list[Outcome], path: Path = RESULTS) -> None:
    """Results with the versions that gave them."""
    import transformers

    versions = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    rows, tried = ([dataclasses.asdict(outcome) for outcome in outcomes] for outcomes in (rows, tried))
    path.write_text(json.dumps({"versions": versions, "rows": rows, "tried": tried}, indent=1) + "\n")


def section(data: dict) -> str:
    """The README's part: one sentence, the zoo's rows, and folded away what was tried beyond them."""
    lines = [summary(data), "", "<details><summary>Every row of the zoo, and every family tried</summary>", ""]
    lines += [table(data["rows"]), ""]
    if data["tried"]:
        tried = sorted(data["tried"], key=lambda outcome: STATUSES.index(outcome.status))
        lines += ["Tried with the common sizes, not tuned and not promised:", "", table(tried), ""]
    return "\n".join([*lines, "</details>"])


def table(outcomes: list[Outcome]) -> str:
    """Markdown, one line a row and result; implementations with the same result stand together."""
    merged: dict[tuple[str, ...], list[str]] = {}
    for outcome in outcomes:
        name = outcome.row if outcome.row == outcome.family else f"{outcome.row} ({outcome.family})"
        result = outcome.status + (f": {outcome.reason}" if outcome.reason else "")
        merged.setdefault((name, result.replace("|", "/"), _layers(outcome.layers)), []).append(outcome.attn)
    lines = ["| decoder | attention | result | layers: query/KV heads x size, scale; mask |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {', '.join(attn)} | {result} | {layers} |" for (name, result, layers), attn in merged.items()
    ]
    return "\n".join(lines)


def _layers(layers: tuple[str, ...]) -> str:
    """Equal layers once, with their number."""
    return ", then ".join(f"{layers.count(layer)} × {layer}" for layer in dict.fromkeys(layers))


def summary(data: dict) -> str:
    """One sentence: how many families, rows and refusals."""
    rows = data["rows"]
    identical = {outcome.family for outcome in rows if outcome.status == "identical"}
    refused = {outcome.row for outcome in rows if outcome.status == "refused"}
    also = sum(outcome.status == "identical" for outcome in data["tried"])
    return (
        f"With torch {data['versions']['torch']} and transformers {data['versions']['transformers']} {len(identical)} "
        f"families give the untouched model's tokens; rows refused: {len(refused)}."
        + (f" Of {len(data['tried'])} further families, tried with the common sizes, {also} do." if also else "")
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", nargs="*", help="rows or families to renew; default: all")
    parser.add_argument("--output", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--no-tried", action="store_true", help="leave out families without a row")
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    known = read(args.output) if args.row and args.output.exists() else {"rows": [], "tried": []}
    done = {(outcome.row, outcome.attn): outcome for outcome in known["rows"]}
    tried = {outcome.row: outcome for outcome in known["tried"]}
    rows = [(row.name, attn) for row in ZOO.values() for attn in row.checked]
    families = () if args.no_tried else untabled()
    for name, attn in [*rows, *((family, "") for family in families)]:
        if args.row and name not in args.row:
            continue
        outcome = check(ZOO[name], attn) if attn else attempt(name)
        if attn:
            done[name, attn] = outcome
        else:
            tried[name] = outcome
        print(f"{name:20s} {outcome.attn:6s} {outcome.status} {outcome.reason}", file=sys.stderr, flush=True)
        write([done[key] for key in rows if key in done], [tried[key] for key in families if key in tried], args.output)
    print(summary(read(args.output)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
