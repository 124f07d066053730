"""Give the linear layers of a program for few tokens a kernel that reads weights at the memory's speed.

A matrix-vector product does two operations a weight, so it is bound by reading the weights. Layers of one input, such
as query, key and value, are read in one sweep.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from kvpass.kernels import cpu
from kvpass.kernels.linear import linears
from kvpass.passes.evaluate import attribute
from kvpass.passes.spec import Program

aten = torch.ops.aten


def use_skinny_linears(program: Program, rows: int) -> Program:
    """Replace ``aten.linear`` on constant weights by ``kvpass::linears``, where the kernel takes ``rows`` rows."""
    if rows > cpu.MAX_LINEAR_ROWS:
        return program
    graph = program.module.graph
    by_input: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is aten.linear.default and _supported(program, node):
            by_input.setdefault(node.args[0], []).append(node)
    for nodes in by_input.values():
        for start in range(0, len(nodes), cpu.MAX_LAYERS):
            _merge(graph, nodes[start : start + cpu.MAX_LAYERS])
    graph.lint()
    program.module.recompile()
    return program


def _merge(graph, nodes: list[Node]) -> None:
    x = nodes[0].args[0]  # as it is now: the input may have been a linear layer that was replaced
    with graph.inserting_before(nodes[0]):
        weights = [node.args[1] for node in nodes]
        biases = [node.args[2] if len(node.args) > 2 else None for node in nodes]
        merged = graph.call_function(linears, (x, weights, biases))
        parts = [graph.call_function(operator.getitem, (merged, index)) for index in range(len(nodes))]
    for node, part in zip(nodes, parts, strict=True):
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def _supported(program: Program, node: Node) -> bool:
    constants = [arg for arg in node.args[1:] if arg is not None]
    if any(arg.op != "get_attr" for arg in constants):
        return False
    weight, *bias = (attribute(program, arg) for arg in constants)
    example = torch.empty(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        return cpu.supports_linear(example, weight, bias[0] if bias else None)
