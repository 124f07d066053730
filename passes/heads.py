"""Which KV head each query head reads: found by running the expansion on random numbers, whatever its spelling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from kvpass.passes.evaluate import Unevaluable, concrete, evaluate, substitution
from kvpass.passes.spec import Captured, Sizes

_SAMPLE = Sizes(batch=2, length=5)


@dataclass(frozen=True)
class HeadSource:
    """The tensor a cache has to keep for an attention operand."""

    node: Node  # [B, Hkv, S, D]
    kv_heads: int
    dim: int
    head_map: tuple[int, ...]  # query head -> KV head

    @property
    def grouped(self) -> bool:
        """Query heads h*G .. h*G+G-1 read KV head h."""
        group = len(self.head_map) // self.kv_heads
        return self.head_map == tuple(head // group for head in range(len(self.head_map)))


def find_source(captured: Captured, operand: Node, heads: int, transposed: bool) -> HeadSource | None:
    """Walk back from an attention operand to the tensor with the fewest heads that it is an expansion of.

    ``operand`` is [B, H, S, D], or [B, H, D, S] when ``transposed``; H is ``heads``, or the KV heads where the
    attention itself repeats them. None when it is not an expansion of any [B, Hkv, S, D].
    """
    best, node = None, operand
    while node is not None:
        found = _as_source(captured, node, operand, heads, transposed)
        if found is not None and (best is None or found.kv_heads < best.kv_heads):
            best = found
        tensors = [arg for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), torch.Tensor)]
        node = tensors[0] if len(tensors) == 1 and node.op == "call_function" else None
    return best


def _as_source(captured: Captured, node: Node, operand: Node, heads: int, transposed: bool) -> HeadSource | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.ndim != 4 or not value.is_floating_point():
        return None
    numbers = substitution(captured, _SAMPLE)
    shape = [concrete(size, numbers) for size in value.shape]
    if shape[0] != _SAMPLE.batch or shape[2] != _SAMPLE.length or heads % shape[1]:
        return None
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(shape, generator=generator).to(value.dtype).to(value.device)
    try:
        result = evaluate(captured, operand, {node: sample}, _SAMPLE)
    except Unevaluable:
        return None
    if transposed:
        result = result.transpose(2, 3)
    if result.shape[0] != shape[0] or result.shape[2:] != sample.shape[2:] or heads % result.shape[1]:
        return None
    result = result.repeat_interleave(heads // result.shape[1], 1)  # what enable_gqa does
    equal = (result.unsqueeze(2) == sample.unsqueeze(1)).all(-1).all(-1).all(0)  # [H, Hkv]
    if not bool((equal.sum(-1) == 1).all()):
        return None
    return HeadSource(node, shape[1], shape[3], tuple(equal.int().argmax(-1).tolist()))
