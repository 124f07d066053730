"""Prove by evaluation that nothing outside the found attentions mixes tokens.

The rewritten graph runs a piece of the sequence at a time, which is only right when every node outside the sites is a
function of its own token. Two runs that differ in one token, with the attentions' outputs held fixed, show which nodes
are not: convolutions, recurrences, token shifts, statistics over the sequence.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Interpreter, Node

from kvpass.passes import places
from kvpass.passes.evaluate import backward_slice, concrete, substitution
from kvpass.passes.spec import Plan, Refusal, Sizes

_SAMPLE = Sizes(batch=2, length=7, keep=7)
_UNINITIALISED = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
)
# Of the largest value: products over groups of tokens, such as experts', round with the size of the group.
_ROUNDING = 1e-5
_CHANGED = 3  # the token that differs between the two runs


class _Recorder(Interpreter):
    """Runs the graph; keeps every value, and replaces the ones it is given."""

    def __init__(self, module, held: dict[Node, torch.Tensor]):
        super().__init__(module, garbage_collect_values=False)
        self.held, self.values = held, {}

    def run_node(self, node: Node):
        value = self.held[node] if node in self.held else super().run_node(node)
        if node.target in _UNINITIALISED:
            value.zero_()  # what is written over it is judged, not what the memory happened to hold
        self.values[node] = value
        return value


@torch.no_grad()
def check_locality(plan: Plan) -> Plan:
    """The plan with a refusal naming the first node that mixes tokens outside attention, if there is one."""
    if plan.refusals:
        return plan
    captured = plan.captured
    device = next(iter(captured.module.parameters())).device
    ids = torch.arange(2, 2 + _SAMPLE.length, device=device).repeat(_SAMPLE.batch, 1)
    changed = ids.clone()
    changed[:, _CHANGED] = 1
    outputs = {site.output for site in plan.sites}
    before = _run(captured, ids, {})
    after = _run(captured, changed, {node: before[node] for node in outputs})
    numbers = substitution(captured, _SAMPLE)
    # What only feeds an attention from inside, its scores and masks, is replaced and may mix tokens.
    results = [node for node in captured.graph.nodes if node.op == "output"]
    operands = [node for site in plan.sites for node in (site.q, site.k, site.v)]
    for node in backward_slice([*results, *operands], stop=outputs):
        value = before[node]
        if isinstance(value, torch.Tensor) and node.op == "call_function" and node not in outputs:
            leak = _leaks(node, value, after[node], captured, numbers)
            if leak:
                return dataclasses.replace(
                    plan,
                    refusals=(
                        Refusal(
                            reason=f"mixes tokens outside attention ({node.target})",
                            layer=places.layer(node),
                            node=node.name,
                            source=places.source(node),
                            hint="only attention may carry information from token to token",
                        ),
                    ),
                )
    return plan


def _run(captured, ids, held) -> dict[Node, object]:
    positions = torch.arange(_SAMPLE.length, device=ids.device).repeat(_SAMPLE.batch, 1)
    feeds = {
        "input_ids": ids,
        "position_ids": positions,
        "attention_mask": torch.ones_like(ids),
        "keep": torch.arange(_SAMPLE.keep, device=ids.device),
    }
    recorder = _Recorder(captured.module, held)
    recorder.run(*(feeds[name] for name in captured.inputs))
    return recorder.values


def _leaks(node, before, after, captured, numbers) -> bool:
    """Whether a token other than the changed one differs."""
    shape = node.meta["val"].shape if isinstance(node.meta.get("val"), torch.Tensor) else ()
    if before.shape != after.shape or len(shape) != before.ndim:
        return False  # sizes that depend on data, such as expert dispatch: judged where tokens are back in order
    for axis, size in enumerate(shape):
        if not isinstance(size, torch.SymInt):
            continue
        number = concrete(size, numbers) if size.node.expr.free_symbols <= set(numbers) else 0
        if number == _SAMPLE.length:
            others = [token for token in range(_SAMPLE.length) if token != _CHANGED]
        elif number == _SAMPLE.batch * _SAMPLE.length:
            others = [token for token in range(number) if token % _SAMPLE.length != _CHANGED]
        else:
            continue
        index = torch.tensor(others, device=before.device)
        return not torch.allclose(
            before.index_select(axis, index),
            after.index_select(axis, index),
            rtol=1e-4,
            atol=_ROUNDING * _magnitude(before),
            equal_nan=True,
        )
    return False


def _magnitude(value: torch.Tensor) -> float:
    finite = value[value.isfinite()].abs() if value.dtype != torch.bool else value
    return float(finite.max()) if finite.numel() else 0.0
