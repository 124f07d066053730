"""What a mask is, by evaluating it at positions where masks change and comparing with known functions.

A mask of positions is piecewise constant with breaks at integers that occur in its own subgraph, so agreement at those
integers, their multiples and their neighbours, in several padding cases, decides it. Nothing is assumed by default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from kvpass.passes import biases, masks, places
from kvpass.passes.evaluate import (
    KEEP,
    Unevaluable,
    backward_slice,
    concrete,
    evaluate,
    is_size,
    substitution,
)
from kvpass.passes.layouts import letter_kind
from kvpass.passes.readers import Unreadable
from kvpass.passes.spec import Captured, Mask, MaskTerm, Plan, Refusal, Site, Sizes

aten = torch.ops.aten
DENSE_LENGTH = 640  # up to here every position is evaluated
HIDDEN = -1e4  # additive masks below this hide; older models fill with it


@dataclass(frozen=True)
class Case:
    """One sample of inputs to the mask: its padding, and where its positions begin."""

    name: str
    padding: Tensor  # [B, S] int64, 1 = token
    position_ids: Tensor  # [B, S]


def classify(plan: Plan) -> Plan:
    """Give every site its mask, or refuse it. The graph is not changed."""
    sites, refusals, known = [], list(plan.refusals), {}
    for site in plan.sites:
        terms = tuple((term.node, term.hides, term.factor, term.multiplies) for term in site.logits.masks)
        key = (terms, site.heads, site.logits.causal)
        try:
            if key not in known:
                known[key] = _classify(plan.captured, site)
            mask, slopes = known[key]
            sites.append(dataclasses.replace(site, mask=mask, slopes=slopes))
        except Unreadable as failure:
            refusals.append(
                Refusal(
                    reason=failure.reason,
                    layer=site.layer,
                    node=failure.node.name,
                    source=places.source(failure.node) or places.source(site.anchor),
                )
            )
    return dataclasses.replace(plan, sites=tuple(sites), refusals=tuple(refusals))


def _classify(captured: Captured, site: Site) -> tuple[Mask, tuple[float, ...]]:
    """The mask, and the slope of each head where a bias is linear in the key's position."""
    logits = site.logits
    if not logits.masks:
        if logits.causal:
            return Mask(), ()
        raise Unreadable(site.anchor, "the mask is bidirectional: no mask is applied")
    roots = [term.node for term in logits.masks]
    numbers = _integers(captured, roots)
    length = min(3 * max((number for number in numbers), default=16) + 5, _longest(captured, roots))
    dense = length <= DENSE_LENGTH or _has_table(roots)
    points = torch.arange(length) if dense else _points(length, numbers)
    hypotheses, slopes = None, None
    for case in _cases(length):
        seen, bias = _visible(captured, site, case, points, length)
        if logits.causal:
            seen = seen & (points[None, None] <= points[None, :, None])
        if hypotheses is None:
            widest = int(seen.sum(-1).max())  # a window that no integer of the graph tells
            proposed = numbers | {widest} if dense and widest < length else numbers
            hypotheses = list(masks.candidates(proposed))
        # A row whose own token is padding may hold anything: it is never read.
        rows = case.padding.bool()[:, points]
        hypotheses = [(name, number) for name, number in hypotheses if _agrees(name, number, seen, case, points, rows)]
        if not hypotheses:
            raise Unreadable(roots[-1], f"the mask is no known function of positions (with {case.name})")
        if bias is not None:
            slopes = biases.slopes(bias, seen, rows, [points.expand(2, -1), _counted(case)[:, points]], slopes)
            if slopes is None:
                raise Unreadable(roots[-1], "adds a bias to the logits that is not linear in the key's position")
    name, number = hypotheses[0]
    if name not in masks.SUPPORTED:
        raise Unreadable(roots[-1], f"the mask is {name}" + (f"({number})" if number else ""))
    if slopes is not None and logits.softcap:
        raise Unreadable(roots[-1], "adds a bias to the logits after the soft cap")
    return masks.SUPPORTED[name](number), () if slopes is None else tuple(slopes.tolist())


def _agrees(name: str, number: int, seen: Tensor, case: Case, points: Tensor, rows: Tensor) -> bool:
    function, _ = masks.PREDICATES[name]
    # The operator counts positions from a sequence's first token; what it cannot apply may count columns.
    starts = [case.padding.argmax(-1)] + ([] if name in masks.SUPPORTED else [torch.zeros(2, dtype=torch.int64)])
    for start in starts:
        positions = points[None] - start[:, None]
        expected = function(positions[:, :, None], positions[:, None], number)
        if bool((seen == expected & case.padding.bool()[:, None, points])[rows].all()):
            return True
    return False


def _counted(case: Case) -> Tensor:
    """[2, S] position of each token among the real ones."""
    return (case.padding.cumsum(-1) - 1).clamp(min=0)


def _has_table(roots: Iterable[Node]) -> bool:
    """Whether a mask is read from a buffer, which cannot be sampled by sampling positions."""
    tables = (node.meta.get("val") for node in backward_slice(roots) if node.op == "get_attr")
    return any(isinstance(value, torch.Tensor) and value.ndim >= 2 for value in tables)


def _longest(captured: Captured, roots: Iterable[Node]) -> int:
    """The longest sequence that a mask with constants of a fixed length can be evaluated at."""
    longest = 2**31
    for node in backward_slice(roots):
        shape = getattr(node.meta.get("val"), "shape", ())
        table = node.op == "get_attr" and len(shape) >= 2 and shape[-1] == shape[-2]
        if (table or node.target in (aten.arange.default, aten.arange.start)) and isinstance(shape[-1], int):
            longest = min(longest, shape[-1]) if shape[-1] > 2 else longest
    return longest


def _integers(captured: Captured, roots: Iterable[Node]) -> set[int]:
    found = set()
    for node in backward_slice(roots):
        size = node.meta.get("val")
        for arg in node.args if node.op == "call_function" and not is_size(node) else ():
            if isinstance(arg, (int, float)) and not isinstance(arg, bool) and float(arg).is_integer():
                found.add(abs(int(arg)))
        if node.op == "get_attr" and isinstance(size, torch.Tensor) and size.ndim >= 2:
            found.add(int(size.shape[-1]) // 4)  # a mask kept as a buffer: look well inside it
        elif node.op == "get_attr" and isinstance(size, torch.Tensor) and size.numel() == 1:
            found.add(abs(int(_constant(captured, node))))
    return {number for number in found if 1 <= number < 2**31}


def _constant(captured: Captured, node: Node) -> float:
    value = float(evaluate(captured, node, {}, Sizes(2, 2)))
    return value if abs(value) < 2**31 else 0.0


def _points(length: int, numbers: set[int]) -> Tensor:
    near = {0, length // 2, length - 1} | {m * number for number in numbers for m in (1, 2, 3)}
    generator = torch.Generator().manual_seed(0)
    spread = torch.randint(0, length, (64,), generator=generator).tolist()
    chosen = {point + step for point in near for step in range(-3, 4)} | set(spread)
    return torch.tensor(sorted(point for point in chosen if 0 <= point < length))


def _cases(length: int) -> list[Case]:
    ones = torch.ones(2, length, dtype=torch.int64)
    steps = torch.arange(length).expand(2, -1).contiguous()
    left, right, hole = ones.clone(), ones.clone(), ones.clone()
    left[1, : max(1, length // 3)] = 0
    right[1, -max(1, length // 3) :] = 0
    hole[0, length // 2] = 0
    shifted = (left.cumsum(-1) - 1).clamp(min=0)
    return [
        Case("no padding", ones, steps),
        Case("positions that start at 5", ones, steps + 5),
        Case("padding on the left", left, shifted),
        Case("padding on the right", right, steps),
        Case("a hole in the padding mask", hole, steps),
    ]


def _visible(captured: Captured, site: Site, case: Case, points: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
    """[2, P, P] bool: which sampled keys a sampled query sees, all heads agreeing; and what is added to the visible
    logits, [2, H or 1, P, P] fp64, None for nothing."""
    seen = torch.ones(2, len(points), len(points), dtype=torch.bool)
    kept = seen.clone()
    bias = None
    for term in site.logits.masks:
        try:
            value = _evaluate_mask(captured, term.node, case, points, length)
        except Unreadable as failure:
            if term.multiplies:
                raise Unreadable(term.node, "multiplies the logits by a value that depends on data") from failure
            raise
        value = _over_heads(captured, term, value, site.heads, len(points))
        if term.multiplies:
            kept &= (value == 1).all(1).cpu()
            continue
        if value.dtype == torch.bool:
            visible = ~value if term.hides else value
        else:
            added = value.double() * term.factor
            visible = added > HIDDEN
            if bool(added.where(visible, 0).any()):
                bias = added if bias is None else bias + added
        if not bool((visible == visible[:, :1]).all()):
            raise Unreadable(term.node, "the mask differs from head to head")
        seen &= visible[:, 0].cpu()
    if bool((seen & ~kept).any()):
        raise Unreadable(site.logits.masks[0].node, "multiplies logits that no mask hides")
    return seen, bias


def _over_heads(captured: Captured, term: MaskTerm, value: Tensor, heads: int, points: int) -> Tensor:
    """[2, H or 1, P, P] of a mask's value as it is broadcast to the logits it meets."""
    shape = term.at.meta["val"].shape
    kinds = [letter_kind(captured, size) for size in shape[:-2]]
    sizes = (1, points)
    if value.ndim < 2 or value.ndim > len(shape) or value.shape[-2] not in sizes or value.shape[-1] not in sizes:
        raise Unreadable(term.node, f"the mask has shape {tuple(value.shape)}, not [B, H, S, S]")
    known = {"b": 2, "n": 2 * heads}
    lead = [known[kind] if kind in known else int(size) for kind, size in zip(kinds, shape[:-2], strict=True)]
    while value.ndim < len(shape):
        value = value.unsqueeze(0)
    if kinds == ["b", "."]:
        return value.expand(2, -1, points, points)
    if all(size == 1 for size in value.shape[:-2]):
        return value.reshape(1, 1, -1, points).expand(2, 1, points, points)
    return value.expand(*lead, points, points).reshape(2, heads, points, points)


def _evaluate_mask(captured: Captured, root: Node, case: Case, points: Tensor, length: int) -> Tensor:
    inputs = {"attention_mask": case.padding, "position_ids": case.position_ids}
    feeds = {node: value for name, value in inputs.items() if (node := captured.placeholder(name)) is not None}
    sizes = Sizes(batch=2, length=length)
    ids = captured.placeholder("input_ids")
    for node in backward_slice([root]):
        if node.op == "call_function" and node.target in (aten.embedding.default, aten.linear.default):
            raise Unreadable(node, "the mask depends on activations")
        if node is not ids and ids in node.all_input_nodes and not is_size(node):
            raise Unreadable(node, "the mask depends on the tokens themselves")
    feeds[ids] = torch.zeros(2, length, dtype=torch.int64)
    override = None if len(points) == length else _sampled(captured, points, sizes)
    try:
        return evaluate(captured, root, feeds, sizes, override)
    except Unevaluable as failure:
        raise Unreadable(failure.node, f"the mask cannot be evaluated: {failure.reason}") from failure


def _sampled(captured: Captured, points: Tensor, sizes: Sizes):
    """Make every arange over the sequence yield the sampled points only, so that no [S, S] mask is built."""
    numbers = substitution(captured, sizes)

    def override(node: Node, args: tuple, kwargs: dict):
        shape = getattr(node.meta.get("val"), "shape", ())
        along = [isinstance(size, torch.SymInt) and concrete(size, numbers) == sizes.length for size in shape]
        if node.target is aten.arange.default and along == [True] and len(node.args) == 1:
            return points.clone()
        if node.target in (
            aten.expand.default,
            aten.new_ones.default,
            aten.new_zeros.default,
            aten.view.default,
            aten.reshape.default,
        ):
            return node.target(args[0], [_shrink(size, sizes.length, points) for size in args[1]], **kwargs)
        if node.target in (aten.full.default, aten.ones.default, aten.zeros.default):
            return node.target([_shrink(size, sizes.length, points) for size in args[0]], *args[1:], **kwargs)
        return KEEP

    return override


def _shrink(size, length: int, points: Tensor):
    return len(points) if size == length else size
