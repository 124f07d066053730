"""The attention behind a refusal as a script of its own: torch, its numbers, and what it computes, line by line.

The graph of one layer is cut at the contractions with weights; what comes out of those is random numbers in the script.
Nothing of the model or of kvpass is needed to run it, so it can be sent with a bug report.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from kvpass.passes import places
from kvpass.passes.evaluate import attribute, backward_slice, concrete, is_size, substitution
from kvpass.passes.find import SDPA, SOFTMAXES
from kvpass.passes.spec import Captured, Refusal, Sizes

SAMPLE = Sizes(batch=2, length=17, keep=17)
_INLINE = 64  # constants up to this many elements are written out
_INPUTS = {
    "input_ids": "torch.arange(2, 2 + LENGTH).repeat(BATCH, 1)",
    "position_ids": "torch.arange(LENGTH).repeat(BATCH, 1)",
    "attention_mask": "torch.ones(BATCH, LENGTH, dtype=torch.int64)",
    "keep": "torch.arange(LENGTH)",
}
_HEAD = '''"""{layer}: {reason}{source}

Needs torch alone. The inputs, first below, may be changed at will.
"""

import torch

aten = torch.ops.aten
BATCH, LENGTH = {batch}, {length}
torch.manual_seed(0)
'''


def script(captured: Captured, refusal: Refusal) -> str | None:
    """Python source that computes the refused layer's attention weights; None where no node is to blame.

    A refusal about the model as a whole, or one whose node is not in the graph, has no script.
    """
    blamed = next((node for node in captured.graph.nodes if node.name == refusal.node), None)
    if blamed is None:
        return None
    anchors = [node for node in captured.graph.nodes if _is_anchor(node) and places.layer(node) == refusal.layer]
    roots = list(dict.fromkeys([*anchors, blamed]))
    stops = {node for node in captured.graph.nodes if _contracts(captured, node) and node not in roots}
    writer = _Writer(captured, stops)
    inputs, body = [], []
    for node in backward_slice(roots, stops):
        if is_size(node):
            continue
        given = writer.given(node)
        place = places.source(node)
        line = f"{node.name} = {given or writer.call(node)}" + (f"  # {place}" if place else "")
        if node is blamed:
            body.append(f"# refused here: {refusal.reason}")
        (inputs if given else body).append(line)
    head = _HEAD.format(
        layer=refusal.layer,
        reason=refusal.reason,
        source=f" ({refusal.source})" if refusal.source else "",
        batch=SAMPLE.batch,
        length=SAMPLE.length,
    )
    shapes = [f'print("{node.name}", tuple({node.name}.shape))' for node in roots]
    return "\n".join([head, *inputs, "", *body, "", *shapes, ""])


def _is_anchor(node: Node) -> bool:
    return node.op == "call_function" and (node.target is SDPA or node.target in SOFTMAXES)


def _contracts(captured: Captured, node: Node) -> bool:
    """Whether a node reads a weight matrix, or something that is no single operator: the script starts behind it."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
        return True
    known = substitution(captured, SAMPLE).keys()
    if _sized(node, known) and not all(_sized(source, known) for source in node.all_input_nodes):
        return True  # sizes that depend on data, such as expert dispatch, end here
    weights = [attribute(captured, source) for source in node.all_input_nodes if source.op == "get_attr"]
    return any(isinstance(weight, torch.nn.Parameter) and weight.ndim > 1 for weight in weights)


def _sized(node: Node, known) -> bool:
    """Whether every size of a node, or the size that it is, follows from batch and length."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return all(size.node.expr.free_symbols <= set(known) for size in sizes if isinstance(size, torch.SymInt))


class _Writer:
    """Writes nodes as Python, with every symbolic size as the sample's number."""

    def __init__(self, captured: Captured, stops: set[Node]):
        self.captured, self.stops = captured, stops
        self.numbers = substitution(captured, SAMPLE)

    def given(self, node: Node) -> str | None:
        """The expression of an input, a constant or the result of a contraction; None for what is computed."""
        if node.op == "placeholder":
            return _INPUTS[node.target]
        if node.op == "get_attr":
            return self._constant(attribute(self.captured, node))
        return self._random(node.meta["val"]) if node in self.stops else None

    def _random(self, value: torch.Tensor) -> str:
        shape = [concrete(size, self.numbers) for size in value.shape]
        if value.dtype.is_floating_point:
            return f"torch.randn({shape}, dtype={value.dtype})"
        return f"torch.randint(0, 2, {shape}).to({value.dtype})"

    def _constant(self, value: torch.Tensor) -> str:
        if value.numel() <= _INLINE and not isinstance(value, torch.nn.Parameter):
            return f"torch.tensor({self.text(value.tolist())}, dtype={value.dtype})"
        if value.ndim == 4 and value.dtype == torch.bool and torch.equal(value, torch.ones_like(value).tril()):
            return f"torch.ones({list(value.shape)}, dtype=torch.bool).tril()"
        return self._random(value)

    def call(self, node: Node) -> str:
        """The operator call that makes ``node``."""
        if node.target is operator.getitem:
            return f"{self.text(node.args[0])}[{node.args[1]}]"
        arguments = [self.text(argument) for argument in node.args]
        arguments += [f"{name}={self.text(argument)}" for name, argument in node.kwargs.items()]
        target = str(node.target)
        return f"{target if target.startswith('aten.') else 'torch.ops.' + target}({', '.join(arguments)})"

    def text(self, value: Any) -> str:
        """An argument as Python source."""
        if isinstance(value, Node):
            return str(concrete(value.meta["val"], self.numbers)) if is_size(value) else value.name
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self.text, value))}]"
        if isinstance(value, torch.device):
            return '"cpu"'
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            return f'float("{value}")'
        return str(value) if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)) else repr(value)
