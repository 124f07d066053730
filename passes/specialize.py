"""Fix the batch and one token in a copy of the step program, so that no symbolic size is left in it."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from kvpass.passes.spec import Program

aten = torch.ops.aten


def _is_arithmetic(node: Node) -> bool:
    return not isinstance(node.target, torch._ops.OpOverload)  # sizes are combined by Python's own operators


def specialize(program: Program, batch: int) -> Program:
    """A copy of ``program`` in which every size of ``input_ids`` [B, S] is the integer ``batch`` or 1."""
    graph = Graph()
    mapping: dict[Node, Node] = {}
    graph.output(graph.graph_copy(program.module.graph, mapping))
    known: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is aten.sym_size.int and node.args[0].target == "input_ids":
            known[node] = (batch, 1)[node.args[1]]
        elif isinstance(node.meta.get("val"), torch.SymInt) and all(arg in known for arg in node.all_input_nodes):
            known[node] = node.target(*map_arg(node.args, known.__getitem__), **node.kwargs)
    for node, size in known.items():
        for user in list(node.users):
            user.args = map_arg(user.args, lambda arg, node=node, size=size: size if arg is node else arg)
            user.kwargs = map_arg(user.kwargs, lambda arg, node=node, size=size: size if arg is node else arg)
    for node in reversed(known):
        graph.erase_node(node)
    graph.lint()
    return Program(GraphModule(program.module, graph), program.layers)
