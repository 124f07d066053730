"""Remove nodes that do nothing, so that later passes meet fewer spellings. The graph computes what it did before."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from kvpass.passes.spec import Captured

aten = torch.ops.aten
SUM = aten.sum.dim_IntList
_END = 2**63 - 1

# operator -> does this node leave its first argument as it is?
IDENTITIES: dict[object, Callable[[Node], bool]] = {
    aten.dropout.default: lambda node: node.args[1] == 0 or not node.args[2],
    aten.alias.default: lambda node: True,
    aten.detach.default: lambda node: True,
    aten.lift_fresh_copy.default: lambda node: True,
    aten._to_copy.default: lambda node: _same_tensor(node),
    aten.slice.Tensor: lambda node: _whole_slice(node),
    aten.add.Tensor: lambda node: len(node.args) == 2 and _is_number(node, 0) and not node.kwargs,
}


def _same_tensor(node: Node) -> bool:
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or "memory_format" in node.kwargs:
        return False
    return before.dtype == after.dtype and before.device == after.device


def _whole_slice(node: Node) -> bool:
    _, _dim, start, end, step = (*node.args, *(0, 0, _END, 1)[len(node.args) - 1 :])
    return start == 0 and end == _END and step == 1


def _is_number(node: Node, number: int) -> bool:
    other = node.args[1]
    return isinstance(other, int) and not isinstance(other, bool) and other == number


def _spelled_softmax(node: Node) -> Node | None:
    """What ``node`` is the softmax of over the last dimension: ``exp(x) / sum(exp(x))``."""
    if node.target is not aten.div.Tensor:
        return None
    top, total = node.args
    last = getattr(top, "meta", {}).get("val").ndim - 1 if isinstance(top, Node) and "val" in top.meta else -1
    if getattr(top, "target", None) is not aten.exp.default or getattr(total, "target", None) is not SUM:
        return None
    of, axes, keeps = (*total.args, False)[:3]
    return top.args[0] if of is top and list(axes) in ([-1], [last]) and keeps else None


def _blind_rows_zeroed(node: Node) -> Node | None:
    """The softmax inside ``where(no key is visible, 0, softmax(x))``, whose blind rows the operator zeroes as well."""
    if node.target is not aten.where.self:
        return None
    condition, zero, weights = node.args
    for target in (aten.logical_not.default, aten.any.dim, aten.logical_not.default, aten.eq.Scalar):
        if getattr(condition, "target", None) is not target:
            return None
        condition, rest = condition.args[0], condition.args[1:]
    zeros = getattr(zero, "target", None) in (aten.full_like.default, aten.zeros_like.default, aten.full.default)
    filled = zeros and (zero.target is aten.zeros_like.default or zero.args[1] == 0)
    if rest != (-math.inf,) or not filled or getattr(weights, "target", None) is not aten.softmax.int:
        return None
    logits = weights.args[0]
    shifted = logits.args[0] if logits.target is aten.sub.Tensor else None
    return weights if condition in (logits, shifted) else None


def _canonical_softmax(graph: Graph) -> None:
    """Spell softmax in one way."""
    for node in list(graph.nodes):
        logits, inner = _spelled_softmax(node), _blind_rows_zeroed(node)
        if logits is not None:
            with graph.inserting_before(node):
                inner = graph.call_function(aten.softmax.int, (logits, -1))
            inner.meta = dict(node.meta)
        if inner is not None:
            node.replace_all_uses_with(inner)
            graph.erase_node(node)


def normalize(captured: Captured) -> Captured:
    """Drop identities, assertions about metadata and guard calls; spell softmax in one way."""
    graph = captured.graph
    for node in list(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default or node.target == "_guards_fn":
            graph.erase_node(node)
        elif node.op == "call_function" and node.target in IDENTITIES and IDENTITIES[node.target](node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    _canonical_softmax(graph)
    graph.eliminate_dead_code()
    captured.module.recompile()
    return captured
