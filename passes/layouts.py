"""How an attention operand lies in memory, as one letter a dimension, and its canonical form [B, H, S, D].

``b`` batch, ``h`` head, ``g`` query head within its group, ``s`` token, ``d`` channel, ``n`` batch and head in one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvpass.passes.evaluate import concrete, substitution
from kvpass.passes.spec import Captured, Sizes

aten = torch.ops.aten
CANONICAL = "bhsd"
# In the order in which they are preferred where a shape allows several.
LAYOUTS = ("bhsd", "bhds", "bshd", "sbhd", "bhgsd", "bhgds", "bshgd", "nsd", "nds", "snd", "bsd", "bds")
_ORDER = "nbhgsd"
# Two samples of sizes tell which symbol a size is: no dimension of a model follows both.
_PROBES = (Sizes(batch=3, length=7), Sizes(batch=11, length=13))


def letter_kind(captured: Captured, size) -> str:
    """``b``, ``s``, ``n`` (a multiple of the batch), ``.`` (a constant) or ``?``."""
    if not isinstance(size, torch.SymInt):
        return "."
    seen = [concrete(size, substitution(captured, probe)) for probe in _PROBES]
    if seen == [probe.batch for probe in _PROBES]:
        return "b"
    if seen == [probe.length for probe in _PROBES]:
        return "s"
    times = seen[0] // _PROBES[0].batch
    return "n" if seen == [times * probe.batch for probe in _PROBES] else "?"


def layouts_of(captured: Captured, node: Node) -> Iterator[str]:
    """Every layout that the node's shape allows."""
    shape = getattr(node.meta.get("val"), "shape", ())
    kinds = [letter_kind(captured, size) for size in shape]
    for layout in LAYOUTS:
        if len(layout) == len(kinds) and all(
            kind == (letter if letter in "bsn" else ".") for letter, kind in zip(layout, kinds, strict=True)
        ):
            yield layout


def heads_of(layout: str, shape: tuple[int, ...], batch: int) -> int:
    """Heads of a tensor of ``shape`` in that layout."""
    sizes = dict(zip(layout, shape, strict=True))
    return sizes["n"] // batch if "n" in sizes else sizes.get("h", 1) * sizes.get("g", 1)


def to_canonical(layout: str, tensor: Tensor, batch: int) -> Tensor:
    """[B, H, S, D] of a tensor in ``layout``."""
    ordered = tensor.permute([layout.index(letter) for letter in _ORDER if letter in layout])
    return ordered.reshape(batch, -1, *ordered.shape[-2:])


def from_canonical(layout: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor [B, H, S, D] in ``layout``, where it has ``shape``."""
    letters = [letter for letter in _ORDER if letter in layout]
    sizes = dict(zip(layout, shape, strict=True))
    return tensor.reshape([sizes[letter] for letter in letters]).permute([letters.index(letter) for letter in layout])


def insert_canonical(graph: Graph, node: Node, layout: str, sizes: dict[str, Node | int]) -> Node:
    """Nodes that turn ``node`` into [B, H, S, D]; ``sizes`` has b, h, s and d."""
    if layout == CANONICAL:
        return node
    order = [layout.index(letter) for letter in _ORDER if letter in layout]
    node = _permuted(graph, node, order)
    if len(layout) == 4:
        return node
    return graph.call_function(aten.reshape.default, (node, [sizes[letter] for letter in CANONICAL]))


def insert_layout(graph: Graph, node: Node, layout: str, sizes: dict[str, Node | int]) -> Node:
    """Nodes that turn ``node`` [B, H, S, D] into ``layout``; ``sizes`` has every letter but n, which is b times h."""
    if layout == CANONICAL:
        return node
    letters = [letter for letter in _ORDER if letter in layout]
    if len(layout) != 4:
        node = graph.call_function(aten.reshape.default, (node, [sizes.get(letter, -1) for letter in letters]))
    return _permuted(graph, node, [letters.index(letter) for letter in layout])


def _permuted(graph: Graph, node: Node, order: list[int]) -> Node:
    if order == sorted(order):
        return node
    return graph.call_function(aten.permute.default, (node, order))
