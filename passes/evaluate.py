"""Interpret a slice of the graph on concrete values. Knows nothing about attention.

Masks, head maps and biases are functions of positions only; running them tells what they are whatever their spelling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from kvpass.passes.spec import Captured, Program, Sizes


class Unevaluable(Exception):
    """A node outside what was fed is needed, or an operator failed on the sample."""

    def __init__(self, node: Node, reason: str):
        self.node, self.reason = node, reason
        super().__init__(f"{node.name}: {reason}")


Override = Callable[[Node, tuple, dict], Any]
KEEP = object()  # an override's answer for "run the node as it is"


def substitution(captured: Captured, sizes: Sizes) -> dict:
    """The graph's symbols with the sample's sizes."""
    return {symbol: getattr(sizes, axis) for symbol, axis in captured.symbols.items()}


def concrete(value: Any, numbers: dict) -> int:
    """A possibly symbolic size under the substitution ``numbers``."""
    if isinstance(value, int):
        return value
    return int(value.node.expr.xreplace(numbers))


def attribute(captured: Captured | Program, node: Node | str) -> Any:
    """The parameter, buffer or constant behind a get_attr node, or of that name."""
    target = captured.module
    for part in str(node if isinstance(node, str) else node.target).split("."):
        target = getattr(target, part)
    return target


def is_size(node: Node) -> bool:
    """Whether the node is a symbolic size rather than a tensor."""
    return isinstance(node.meta.get("val"), torch.SymInt)


def backward_slice(roots: Iterable[Node], stop: Iterable[Node] = ()) -> list[Node]:
    """Nodes that ``roots`` depend on, roots included, in graph order; nothing behind ``stop`` or behind a size."""
    seen, stack, ends = set(), list(roots), set(stop)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if node not in ends and not is_size(node):
                stack.extend(node.all_input_nodes)
    if not seen:
        return []
    return [node for node in next(iter(seen)).graph.nodes if node in seen]


@torch.no_grad()
def evaluate(
    captured: Captured,
    root: Node,
    feeds: Mapping[Node, Any],
    sizes: Sizes,
    override: Override | None = None,
) -> Any:
    """The value of ``root`` when ``feeds`` are given and the symbols have the sizes of the sample.

    Raises:
        Unevaluable: an input that was not fed is needed, or an operator fails.
    """
    numbers = substitution(captured, sizes)
    values: dict[Node, Any] = dict(feeds)
    for node in backward_slice([root], feeds):
        if node in values:
            continue
        if is_size(node):
            values[node] = concrete(node.meta["val"], numbers)
        elif node.op == "get_attr":
            values[node] = attribute(captured, node)
        elif node.op == "placeholder":
            raise Unevaluable(node, f"depends on the input {node.target}")
        elif node.op != "call_function":
            raise Unevaluable(node, f"is a {node.op}")
        else:
            args = map_arg(node.args, values.__getitem__)
            kwargs = map_arg(node.kwargs, values.__getitem__)
            answer = KEEP if override is None else override(node, args, kwargs)
            if answer is KEEP:
                try:
                    answer = node.target(*args, **kwargs)
                except Exception as error:
                    raise Unevaluable(node, str(error).splitlines()[0]) from error
            values[node] = answer
    return values[root]
