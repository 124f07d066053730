"""What the two contractions of an attention compute, by running them on random numbers.

Whatever the spelling, the scores must be ``cap(scale * q k^T)`` and the output the weights times the values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from kvpass.passes.evaluate import Unevaluable, evaluate
from kvpass.passes.heads import SAMPLE, sample, sample_shape
from kvpass.passes.layouts import heads_of, layouts_of, to_canonical
from kvpass.passes.readers import Unreadable
from kvpass.passes.spec import Captured, Logits

aten = torch.ops.aten
Operand = tuple[Node, str]  # a node and its layout


def _close(got: Tensor, expected: Tensor) -> bool:
    half = got.dtype in (torch.bfloat16, torch.float16)
    tolerance = 6e-2 if half else 1e-3  # a wrong layout or factor is off by the size of the values themselves
    expected = expected.to(got.dtype)
    return bool(torch.allclose(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())))


def read_scores(captured: Captured, logits: Logits) -> tuple[Operand, Operand]:
    """Query and key of the unmasked logits.

    Raises:
        Unreadable: they are not scaled and capped scores of every query token with every key token.
    """
    first, second = logits.operands
    neutral = {term.node: torch.zeros(sample_shape(captured, term.node)) for term in logits.masks if _inside(term)}
    for q, k in ((first, second), (second, first)):
        for q_layout in layouts_of(captured, q):
            for k_layout in layouts_of(captured, k):
                if _is_score(captured, logits, (q, q_layout), (k, k_layout), neutral):
                    return (q, q_layout), (k, k_layout)
    raise Unreadable(logits.core, "the scores are not one product of queries and keys over the head dimension")


def _inside(term) -> bool:
    return term.at.target is aten.baddbmm.default and term.at.args[0] is term.node


def _is_score(captured, logits: Logits, query: Operand, key: Operand, neutral: dict) -> bool:
    given_q, q = sample(captured, *query, seed=1)
    given_k, k = sample(captured, *key, seed=2)
    if q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        return False
    try:
        got = evaluate(captured, logits.core, {**neutral, query[0]: given_q, key[0]: given_k}, SAMPLE)
    except Unevaluable:
        return False
    expected = _capped(logits.core_scale * _scores(q, k), logits.softcap)
    return got.numel() == expected.numel() and _close(got.reshape(expected.shape).double(), expected)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)


def _capped(logits: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(logits / cap) if cap else logits


def check_views(captured: Captured, logits: Logits) -> None:
    """Changes of shape after the first mask keep heads, queries and keys in their order."""
    for before, after in logits.views:
        shape = sample_shape(captured, before)
        count = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
        try:
            moved = evaluate(captured, after, {before: count}, SAMPLE)
        except Unevaluable as failure:
            raise Unreadable(after, f"the logits are rearranged: {failure.reason}") from failure
        if not torch.equal(moved.flatten(), count.flatten()):
            raise Unreadable(after, "the logits are rearranged after the mask")


def read_output(captured: Captured, softmax: Node, output: Node, operands: tuple[Node, Node], heads: int):
    """The value operand and the layout of the output, ``weights @ values``.

    Raises:
        Unreadable: the output is something else.
    """
    shape = sample_shape(captured, softmax)
    weights = torch.rand(shape, generator=torch.Generator().manual_seed(3)).to(softmax.meta["val"].dtype)
    rows = weights.reshape(SAMPLE.batch, heads, SAMPLE.length, -1)[..., : SAMPLE.length].double()
    for values in operands:
        for layout in layouts_of(captured, values):
            given, v = sample(captured, values, layout, seed=4)
            if heads % v.shape[1]:
                continue
            try:
                got = evaluate(captured, output, {softmax: weights, values: given}, SAMPLE)
            except Unevaluable:
                continue
            expected = rows @ v.double().repeat_interleave(heads // v.shape[1], 1)
            for out in layouts_of(captured, output):
                if got.numel() != expected.numel() or heads_of(out, got.shape, SAMPLE.batch) != heads:
                    continue
                canonical = to_canonical(out, got, SAMPLE.batch)
                if canonical.shape == expected.shape and _close(canonical, expected):
                    return (values, layout), out
    raise Unreadable(output, "the output is not the weights times the values")
