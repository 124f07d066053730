"""Cut a program around each attention, and find the pieces that are the same computation on other weights.

Decoder layers repeat. Lowering one of them serves all, which makes cold start a matter of one layer instead of thirty.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from kvpass.kernels.attend import attend
from kvpass.passes.spec import Program


@dataclass(frozen=True)
class Region:
    """A piece of a program: a function of everything it uses, weights included."""

    module: GraphModule
    inputs: tuple[Node, ...]  # nodes of the program, in the order of the module's placeholders
    outputs: tuple[Node, ...]

    @property
    def attention(self) -> Node | None:
        """The node of the module that is the attention, where the region is one."""
        return next((node for node in self.module.graph.nodes if node.target is attend), None)

    def key(self, examples: Sequence[Tensor]) -> Hashable:
        """Equal for regions that compute the same function of inputs of the same kind."""
        index: dict[Node, int] = {}
        lines = []
        for node in self.module.graph.nodes:
            index[node] = len(index)
            operands = map_aggregate(
                (node.args, node.kwargs), lambda arg: ("node", index[arg]) if isinstance(arg, Node) else arg
            )
            lines.append((node.op, str(node.target) if node.op == "call_function" else "", repr(operands)))
        kinds = tuple((_kind(node, value)) for node, value in zip(self.inputs, examples, strict=True))
        return tuple(lines), kinds


def _kind(node: Node, value: Tensor) -> tuple:
    # Rows and tails differ in length from layer to layer and from step to step, and nothing but `attend` looks.
    grows = is_state(node)
    shape = () if grows else tuple(value.shape)
    return value.ndim, shape, () if grows else value.stride(), value.dtype, value.device


def is_state(node: Node) -> bool:
    """Whether a node is a part of the cache, whose sizes change."""
    return node.op == "placeholder" and str(node.target).startswith(("kv", "tail_pos"))


def cut(program: Program) -> list[Region]:
    """Regions in order of execution; each attention is a region by itself."""
    groups: list[list[Node]] = [[]]
    for node in program.module.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node.target is attend:
            groups += [[node], []]
        else:
            groups[-1].append(node)
    return [_region(group) for group in groups if group]


def _region(group: list[Node]) -> Region:
    inside = set(group)
    inputs = tuple(dict.fromkeys(arg for node in group for arg in node.all_input_nodes if arg not in inside))
    outputs = tuple(node for node in group if any(user not in inside for user in node.users))
    graph = Graph()
    mapping = {node: graph.placeholder(f"in{position}") for position, node in enumerate(inputs)}
    for node in group:
        mapping[node] = graph.node_copy(node, mapping.__getitem__)
    graph.output(tuple(mapping[node] for node in outputs))
    return Region(GraphModule(torch.nn.Module(), graph), inputs, outputs)
