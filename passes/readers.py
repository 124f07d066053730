"""Read the expression under a softmax backwards, one short function per operator.

A reader returns the :class:`Logits` of its node, built from those of the operand it continues with, or raises
:class:`Unreadable` with the reason. Adding a spelling is one function.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable

import torch
from torch.fx import Node

from kvpass.passes.spec import Logits, MaskTerm

aten = torch.ops.aten


class Unreadable(Exception):
    """A step between the scores and the softmax that no reader understands."""

    def __init__(self, node: Node, reason: str, depth: int = 0):
        self.node, self.reason, self.depth = node, reason, depth
        super().__init__(reason)


Reader = Callable[[Node], Logits]
READERS: dict[object, Callable[[Node, Reader], Logits]] = {}


def reads(*operators):
    """Register a reader for ATen operators."""

    def register(function):
        READERS.update(dict.fromkeys(operators, function))
        return function

    return register


def read(node: Node) -> Logits:
    """The logits expression that ends in ``node``.

    Raises:
        Unreadable: at the deepest step that could not be read.
    """
    reader = READERS.get(node.target) if node.op == "call_function" else None
    if reader is None:
        raise Unreadable(node, f"unread step {_name(node)} between scores and softmax")
    try:
        return reader(node, read)
    except Unreadable as failure:
        failure.depth += 1
        raise


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", None) or str(node.target)


def _step(logits: Logits, name: str, **changes) -> Logits:
    return dataclasses.replace(logits, steps=(*logits.steps, name), **changes)


def _masked(logits: Logits, mask: Node, hides: bool = False) -> Logits:
    return _step(logits, "mask", masks=(*logits.masks, MaskTerm(mask, hides)))


def _number(value) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Node) and value.target in (aten.full.default, aten.scalar_tensor.default):
        filled = value.args[1] if value.target is aten.full.default else value.args[0]
        shape = value.args[0] if value.target is aten.full.default else ()
        return float(filled) if not shape and isinstance(filled, (int, float)) else None
    return None


def _scaled(node: Node, logits: Logits, factor: float) -> Logits:
    if "mask" in logits.steps:
        raise Unreadable(node, "scales the logits after the mask")
    if logits.steps[-1:] == ("tanh",):
        # cap * tanh(x / cap): what the tanh was fed must have been divided by the cap.
        return _step(logits, "cap", scale=logits.scale * factor, softcap=factor)
    if "cap" in logits.steps:
        raise Unreadable(node, "scales the logits after the soft cap")
    return _step(logits, "scale", scale=logits.scale * factor)


@reads(aten.matmul.default, aten.bmm.default)
def _matmul(node: Node, read: Reader) -> Logits:
    left, right = node.args[:2]
    if left.meta["val"].ndim != 4 or right.meta["val"].ndim != 4:
        raise Unreadable(node, f"contracts {left.meta['val'].ndim}-dimensional operands, not [B, H, S, D]")
    return Logits(q=left, keys=right, keys_transposed=True, steps=("matmul",))


@reads(aten.mul.Tensor, aten.mul.Scalar)
def _mul(node: Node, read: Reader) -> Logits:
    for inner, factor in (node.args[:2], node.args[1::-1]):
        number = _number(factor)
        if number is not None and isinstance(inner, Node):
            return _scaled(node, read(inner), number)
    raise Unreadable(node, "multiplies the logits by a value that depends on data")


@reads(aten.div.Tensor, aten.div.Scalar)
def _div(node: Node, read: Reader) -> Logits:
    number = _number(node.args[1])
    if number is None:
        raise Unreadable(node, "divides the logits by a value that depends on data")
    if number == 0:
        raise Unreadable(node, "divides the logits by zero")
    return _scaled(node, read(node.args[0]), 1.0 / number)


@reads(aten.tanh.default)
def _tanh(node: Node, read: Reader) -> Logits:
    logits = read(node.args[0])
    if "mask" in logits.steps:
        raise Unreadable(node, "applies the soft cap after the mask")
    if "tanh" in logits.steps:
        raise Unreadable(node, "applies two soft caps")
    return _step(logits, "tanh")


@reads(aten.add.Tensor)
def _add(node: Node, read: Reader) -> Logits:
    if node.kwargs.get("alpha", 1) != 1:
        raise Unreadable(node, "adds a multiple of the mask")
    failures = []
    for inner, mask in (node.args[:2], node.args[1::-1]):
        if isinstance(inner, Node) and isinstance(mask, Node):
            try:
                logits = read(inner)
                return _masked(logits, mask)
            except Unreadable as failure:
                failures.append(failure)
    if not failures:
        raise Unreadable(node, "adds a number to the logits")
    raise max(failures, key=lambda failure: failure.depth)


@reads(aten.where.self)
def _where(node: Node, read: Reader) -> Logits:
    condition, inner, other = node.args
    if _lowest(other) is None:
        raise Unreadable(node, "replaces masked logits by something other than a very negative number")
    return _masked(read(inner), condition)


@reads(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(node: Node, read: Reader) -> Logits:
    inner, condition, value = node.args
    if _lowest(value) is None:
        raise Unreadable(node, "fills masked logits with something other than a very negative number")
    return _masked(read(inner), condition, hides=True)


@reads(aten._to_copy.default, aten.clone.default)
def _cast(node: Node, read: Reader) -> Logits:
    target = node.kwargs.get("dtype")
    if target is not None and not target.is_floating_point:
        raise Unreadable(node, f"casts the logits to {target}")
    return read(node.args[0])


@reads(aten.cat.default)
def _cat(node: Node, read: Reader) -> Logits:
    parts, axis = (*node.args, 0)[:2]
    if len(parts) != 2 or axis not in (-1, 3):
        raise Unreadable(node, "concatenates something that is not one sink column")
    return _step(read(parts[0]), "sinks", sinks=parts[1])


@reads(aten.sub.Tensor)
def _sub(node: Node, read: Reader) -> Logits:
    inner, shift = node.args
    if isinstance(shift, Node) and _is_row_maximum(shift, inner):
        return read(inner)  # a constant per query cancels in the softmax
    raise Unreadable(node, "subtracts something other than the row's maximum")


def _is_row_maximum(node: Node, of: Node) -> bool:
    if node.target is operator.getitem and node.args[1] == 0:
        node = node.args[0]
    return node.target in (aten.amax.default, aten.max.dim) and node.args[0] is of


def _lowest(value) -> float | None:
    number = _number(value)
    return number if number is not None and number <= -1e4 else None
