"""Which tensor a cache has to keep for an attention operand, and which of its heads each query head reads.

Found by running the expansion on random numbers, whatever its spelling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from kvpass.passes.evaluate import Unevaluable, concrete, evaluate, substitution
from kvpass.passes.layouts import CANONICAL, from_canonical, heads_of, layouts_of, to_canonical
from kvpass.passes.spec import Captured, Sizes

SAMPLE = Sizes(batch=2, length=5)


@dataclass(frozen=True)
class HeadSource:
    """The tensor a cache has to keep for an attention operand."""

    node: Node
    layout: str
    kv_heads: int
    dim: int
    head_map: tuple[int, ...]  # query head -> KV head
    factor: float = 1.0  # the operand is this times the tensor

    @property
    def grouped(self) -> bool:
        """Query heads h*G .. h*G+G-1 read KV head h."""
        group = len(self.head_map) // self.kv_heads
        return self.head_map == tuple(head // group for head in range(len(self.head_map)))


def sample_shape(captured: Captured, node: Node) -> tuple[int, ...]:
    """The node's shape with the sizes of ``SAMPLE``."""
    numbers = substitution(captured, SAMPLE)
    return tuple(concrete(size, numbers) for size in node.meta["val"].shape)


def sample(captured: Captured, node: Node, layout: str, seed: int) -> tuple[Tensor, Tensor]:
    """Random numbers in the node's shape, and the same in canonical form [B, H, S, D]."""
    shape = sample_shape(captured, node)
    sizes = dict(zip(layout, shape, strict=True))
    heads = heads_of(layout, shape, SAMPLE.batch)
    generator = torch.Generator().manual_seed(seed)
    canonical = torch.randn(SAMPLE.batch, heads, SAMPLE.length, sizes["d"], generator=generator)
    canonical = canonical.to(node.meta["val"].dtype).to(node.meta["val"].device)
    return from_canonical(layout, canonical, shape), canonical


def sources(captured: Captured, operand: Node, layout: str, heads: int) -> Iterator[HeadSource]:
    """Every tensor that ``operand`` is an expansion of over ``heads`` query heads, from the operand backwards."""
    node: Node | None = operand
    while node is not None:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            for own in layouts_of(captured, node):
                found = _as_source(captured, node, own, operand, layout, heads)
                if found is not None:
                    yield found
        tensors = [arg for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), torch.Tensor)]
        node = tensors[0] if len(tensors) == 1 and node.op == "call_function" else None


def _as_source(captured, node: Node, own: str, operand: Node, layout: str, heads: int) -> HeadSource | None:
    given, canonical = sample(captured, node, own, seed=0)
    if heads % canonical.shape[1]:
        return None
    try:
        result = evaluate(captured, operand, {node: given}, SAMPLE)
    except Unevaluable:
        return None
    result = to_canonical(layout, result, SAMPLE.batch)
    if result.shape[2:] != canonical.shape[2:] or heads % result.shape[1]:
        return None
    result = result.repeat_interleave(heads // result.shape[1], 1)  # what enable_gqa does
    factor = _factor(result, canonical)
    equal = (result.unsqueeze(2) == (factor * canonical).unsqueeze(1)).all(-1).all(-1).all(0)  # [H, Hkv]
    if not bool((equal.sum(-1) == 1).all()):
        return None
    head_map = tuple(equal.int().argmax(-1).tolist())
    return HeadSource(node, own, canonical.shape[1], canonical.shape[3], head_map, factor)


def _factor(result: Tensor, canonical: Tensor) -> float:
    """The constant that makes the first query head a multiple of one of the heads; 1 where there is none.

    A multiple that the operand's own product rounds differently is no multiple here, and the operand is kept itself.
    """
    ratios = result[:, :1].double() / canonical.double()  # [B, Hkv, S, D]
    for head in range(canonical.shape[1]):
        low, high = ratios[:, head].aminmax()
        if low > 0 and high - low < 1e-2 * low:
            exact = float(ratios[:, head].median())
            for factor in (exact, round(exact, 6), float(torch.tensor(exact, dtype=torch.float32))):
                if torch.equal(result[:, 0], factor * canonical[:, head]):
                    return factor
    return 1.0


def shared_sources(captured: Captured, keys, values, heads: int) -> tuple[HeadSource, HeadSource] | None:
    """The key and value to keep, with the fewest heads that both can have; each is given as (node, layout).

    A key may be kept before it is scaled, since the operator scales as well; a value may not.
    """
    best: dict[tuple, tuple] = {}
    found = [list(sources(captured, *operand, heads)) for operand in (keys, values)]
    for pair in ((k, v) for k in found[0] for v in found[1]):
        if pair[0].head_map == pair[1].head_map and pair[0].grouped and pair[1].factor == 1:
            order = (pair[0].kv_heads, sum(source.layout != CANONICAL for source in pair))
            best.setdefault(order, pair)  # of equals the one next to the attention
    return best[min(best)] if best else None
