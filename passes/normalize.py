"""Remove nodes that do nothing, so that later passes meet fewer spellings. The graph computes what it did before."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from kvpass.passes.spec import Captured

aten = torch.ops.aten
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


def normalize(captured: Captured) -> Captured:
    """Drop identities, assertions about metadata and guard calls."""
    graph = captured.graph
    for node in list(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default or node.target == "_guards_fn":
            graph.erase_node(node)
        elif node.op == "call_function" and node.target in IDENTITIES and IDENTITIES[node.target](node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    captured.module.recompile()
    return captured
