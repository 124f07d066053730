"""What an attention operand is made of: the projections behind it, and the activation they all read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.fx import Node

from kvpass.passes.evaluate import attribute, backward_slice, is_size
from kvpass.passes.spec import Captured

aten = torch.ops.aten
# operator -> which argument is the weight of a projection
WEIGHTS = {
    aten.linear.default: 1,
    aten.mm.default: 1,
    aten.matmul.default: 1,
    aten.bmm.default: 1,
    aten.addmm.default: 2,
    aten.baddbmm.default: 2,
    aten.embedding.default: 0,
}


def activations(captured: Captured) -> frozenset[Node]:
    """Nodes whose value depends on the tokens; their number and positions alone do not count."""
    found: set[Node] = set()
    for node in captured.graph.nodes:
        if node.target == "input_ids" or (not is_size(node) and any(arg in found for arg in node.all_input_nodes)):
            found.add(node)
    return frozenset(found)


def projections(captured: Captured, root: Node, active: frozenset[Node]) -> list[Node]:
    """The last contractions with a weight on every path from the tokens to ``root``, in graph order."""
    seen, stack, found = set(), [root], []
    while stack:
        node = stack.pop()
        if node in seen or node not in active:
            continue
        seen.add(node)
        if _is_projection(captured, node):
            found.append(node)
        else:
            stack.extend(node.all_input_nodes)
    order = {node: index for index, node in enumerate(captured.graph.nodes)}
    return sorted(found, key=order.__getitem__)


def common_ancestors(captured: Captured, nodes: Iterable[Node], active: frozenset[Node]) -> Iterator[Node]:
    """Activations through which everything that ``nodes`` know of the tokens has passed, nearest first."""
    order = {node: index for index, node in enumerate(captured.graph.nodes)}
    frontier = set(nodes)
    while frontier:
        last = max(frontier, key=order.__getitem__)
        if len(frontier) == 1:
            yield last
        frontier.remove(last)
        frontier.update(arg for arg in last.all_input_nodes if arg in active)


def attention_input(captured: Captured, operands: Iterable[Node], active: frozenset[Node]) -> Node | None:
    """The nearest [B, S, E] that all projections behind ``operands`` read, and nothing else of the tokens."""
    starts = [node for operand in operands for node in projections(captured, operand, active)]
    read = {arg for node in starts for arg in node.all_input_nodes if arg in active}
    for node in common_ancestors(captured, read, active):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.ndim == 3 and value.is_floating_point():
            axes = [captured.symbols.get(size.node.expr) for size in value.shape[:2] if isinstance(size, torch.SymInt)]
            if axes == ["batch", "length"]:
                return node
    return None


def _is_projection(captured: Captured, node: Node) -> bool:
    place = WEIGHTS.get(node.target)
    if place is None:
        return False
    behind = backward_slice([node.args[place]])
    if any(part.op == "placeholder" for part in behind if not is_size(part)):
        return False
    return any(
        part.op == "get_attr" and isinstance(weight := attribute(captured, part), nn.Parameter) and weight.ndim >= 2
        for part in behind
    )
