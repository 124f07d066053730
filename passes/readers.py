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

# Operators that only change the shape of their first argument.
VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.transpose.int,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.clone.default,
)


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


def settled(logits: Logits, node: Node) -> Logits:
    """The logits with ``node`` as the end of their unmasked part, if nothing before it is."""
    if logits.core is not None:
        return logits
    return dataclasses.replace(logits, core=node, core_scale=logits.scale)


def _masked(logits: Logits, term: MaskTerm) -> Logits:
    return _step(settled(logits, term.at), "mask", masks=(*logits.masks, term))


def _number(value) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Node) and value.target in (aten.full.default, aten.scalar_tensor.default):
        filled = value.args[1] if value.target is aten.full.default else value.args[0]
        shape = value.args[0] if value.target is aten.full.default else ()
        return float(filled) if not shape and isinstance(filled, (int, float)) else None
    if isinstance(value, Node) and value.target is aten.clone.default:
        return _number(value.args[0])
    if isinstance(value, Node) and value.op == "get_attr":
        constant = operator.attrgetter(str(value.target))(value.graph.owning_module)
        trained = isinstance(constant, torch.nn.Parameter)
        return float(constant) if isinstance(constant, torch.Tensor) and constant.ndim == 0 and not trained else None
    return None


def _scaled(node: Node, logits: Logits, factor: float) -> Logits:
    if any(term.boolean for term in logits.masks) or (logits.masks and factor <= 0):
        raise Unreadable(node, "scales the logits after the mask")
    if logits.steps[-1:] == ("tanh",):
        # cap * tanh(x / cap): what the tanh was fed must have been divided by the cap.
        return _step(logits, "cap", scale=logits.scale * factor, softcap=factor)
    if "cap" in logits.steps:
        raise Unreadable(node, "scales the logits after the soft cap")
    masks = tuple(dataclasses.replace(term, factor=term.factor * factor) for term in logits.masks)
    return _step(logits, "scale", scale=logits.scale * factor, masks=masks)


@reads(aten.matmul.default, aten.bmm.default)
def _matmul(node: Node, read: Reader) -> Logits:
    return Logits(operands=tuple(node.args[:2]), steps=("matmul",))


@reads(aten.einsum.default)
def _einsum(node: Node, read: Reader) -> Logits:
    operands = node.args[1]
    if len(operands) != 2:
        raise Unreadable(node, f"contracts {len(operands)} tensors at once")
    return Logits(operands=tuple(operands), steps=("matmul",))


@reads(aten.baddbmm.default)
def _baddbmm(node: Node, read: Reader) -> Logits:
    added, *operands = node.args[:3]
    alpha, beta = (float(node.kwargs.get(name, 1)) for name in ("alpha", "beta"))
    masks = (MaskTerm(added, at=node, factor=beta),) if beta else ()
    steps = ("matmul", "scale", "mask")[: 2 + len(masks)]
    return Logits(operands=tuple(operands), steps=steps, scale=alpha, masks=masks)


@reads(*VIEWS)
def _view(node: Node, read: Reader) -> Logits:
    inner = node.args[0]
    logits = read(inner)
    if logits.core is None:
        return logits  # what lies under the first mask is evaluated as a whole
    return dataclasses.replace(logits, views=(*logits.views, (inner, node)))


@reads(aten.mul.Tensor, aten.mul.Scalar)
def _mul(node: Node, read: Reader) -> Logits:
    failures = [Unreadable(node, "multiplies the logits by a value that depends on data")]
    for inner, factor in (node.args[:2], node.args[1::-1]):
        number = _number(factor)
        if number is not None and isinstance(inner, Node):
            return _scaled(node, read(inner), number)
        try:
            if isinstance(inner, Node) and isinstance(factor, Node):
                return _masked(read(inner), MaskTerm(factor, at=inner, boolean=True, multiplies=True))
        except Unreadable as failure:
            failures.append(failure)
    raise max(failures, key=lambda failure: failure.depth)


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
    failures, alpha = [], float(node.kwargs.get("alpha", 1))
    for inner, mask in (node.args[:2], node.args[1::-1])[: 2 if alpha == 1 else 1]:
        if isinstance(inner, Node) and isinstance(mask, Node):
            try:
                return _masked(read(inner), MaskTerm(mask, at=inner, factor=alpha))
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
    return _masked(read(inner), MaskTerm(condition, at=inner, boolean=True))


@reads(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(node: Node, read: Reader) -> Logits:
    inner, condition, value = node.args
    if _lowest(value) is None:
        raise Unreadable(node, "fills masked logits with something other than a very negative number")
    return _masked(read(inner), MaskTerm(condition, at=inner, hides=True, boolean=True))


@reads(aten._to_copy.default)
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
    return _step(settled(read(parts[0]), parts[0]), "sinks", sinks=parts[1])


@reads(aten.sub.Tensor)
def _sub(node: Node, read: Reader) -> Logits:
    inner, shift = node.args[:2]
    if not isinstance(inner, Node) or not isinstance(shift, Node):
        raise Unreadable(node, "subtracts a number from the logits, or the logits from something")
    if _is_row_maximum(shift, inner):
        return read(inner)  # a constant per query cancels in the softmax
    return _masked(read(inner), MaskTerm(shift, at=inner, factor=-float(node.kwargs.get("alpha", 1))))


def _is_row_maximum(node: Node, of: Node) -> bool:
    if node.target is operator.getitem and node.args[1] == 0:
        node = node.args[0]
    return node.target in (aten.amax.default, aten.max.dim) and node.args[0] is of


@reads(aten.max.other, aten.maximum.default, aten.clamp.default, aten.clamp_min.default)
def _clamped(node: Node, read: Reader) -> Logits:
    inner, lowest, *highest = node.args
    if highest not in ([], [None]) or node.kwargs or _lowest(lowest) is None:
        raise Unreadable(node, "bounds the logits")
    return read(inner)


def _lowest(value) -> float | None:
    number = _number(value)
    return number if number is not None and number <= -1e4 else None
