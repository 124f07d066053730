"""Drop what the rewriting made dead: the mask, its inputs, and the repetition of keys and values."""

from __future__ import annotations

import torch

from kvpass.passes import places
from kvpass.passes.spec import Program, Refusal, UnsupportedModelError


def clean(program: Program) -> Program:
    """Eliminate dead nodes and the padding mask's input.

    Raises:
        UnsupportedModelError: the padding mask is still used, or a [S, S] tensor is left.
    """
    graph = program.module.graph
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.target == "attention_mask":
            if node.users:
                user = next(iter(node.users))
                raise UnsupportedModelError(
                    (
                        Refusal(
                            "the padding mask is used outside attention",
                            places.layer(user),
                            user.name,
                            places.source(user),
                        ),
                    )
                )
            graph.erase_node(node)
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and _quadratic(value):
            raise UnsupportedModelError(
                (Refusal("a [S, S] tensor is left", places.layer(node), node.name, places.source(node)),)
            )
    program.module.recompile()
    return program


def _quadratic(value: torch.Tensor) -> bool:
    symbolic = [size.node.expr for size in value.shape if isinstance(size, torch.SymInt)]
    return any(symbolic.count(expression) > 1 for expression in symbolic)
