"""A decoder as Dynamo traced it, brought into the form that every later pass reads.

Dynamo's graph speaks Python (methods, operators, weights as inputs). Running it under torch.export gives the
same ATen graph as exporting the model itself, so nothing behind this file knows which of the two traced it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._guards import tracing
from torch.fx import GraphModule, Interpreter, Node
from torch.fx import traceback as fx_traceback

from kvpass.passes.capture import export_decoder
from kvpass.passes.spec import Captured, Refusal, UnsupportedModelError

_BASE = re.compile(r"^L(\[[^\]]*\])+")  # the local variable that holds the model
INPUTS = ("input_ids", "position_ids", "attention_mask")
COLUMNS = "logits_to_keep"  # optional: a tensor of the columns whose logits are wanted


@dataclass(frozen=True)
class Call:
    """How the traced call gives its inputs: where each stands among the graph's arguments."""

    captured: Captured
    at: dict[str, int]  # input name -> argument index
    numbers: dict[int, int]  # argument index -> an integer that the trace was specialised to


def capture_call(traced: GraphModule, arguments: Sequence) -> Call:
    """The decoder behind one traced call ``(input_ids, position_ids, attention_mask[, logits_to_keep]) -> logits``.

    Args:
        traced: the graph as a Dynamo backend receives it.
        arguments: its example inputs, weights included.

    Raises:
        UnsupportedModelError: it is a part of a model, lacks one of the inputs, returns more than logits, or its batch
            or length were fixed by the trace.
    """
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    at = {}
    for name in (*INPUTS, COLUMNS):
        found = [i for i, node in enumerate(placeholders) if _last_name(node) == name]
        if len(found) == 1:
            at[name] = found[0]
    _check(traced, placeholders, at)
    module = _Traced(traced, placeholders, arguments, at)
    with tracing(None):  # Dynamo is in the middle of its own trace
        return Call(export_decoder(module), at, module.numbers)


def _refuse(reason: str, hint: str) -> UnsupportedModelError:
    return UnsupportedModelError((Refusal(reason=reason, hint=hint),))


def _check(traced: GraphModule, placeholders: list[Node], at: dict[str, int]) -> None:
    if "input_ids" not in at:
        reasons = _graph_breaks()
        raise _refuse(
            "Dynamo gave only a part of the model" + (f", cut at a graph break: {reasons[0]}" if reasons else ""),
            "torch.compile(..., fullgraph=True) shows where the trace ends",
        )
    for name in INPUTS[1:]:
        if name not in at:
            raise _refuse(f"the traced call does not take {name}", f"pass {name}=... in the call")
    ids = placeholders[at["input_ids"]].meta["example_value"]
    for axis, what, hint in (
        (1, "length", "pass dynamic=True to torch.compile"),
        (0, "batch", "trace with two sequences, or inside kvpass.dynamo.any_batch(...)"),
    ):
        if not isinstance(ids.shape[axis], torch.SymInt):
            raise _refuse(f"the trace fixed the {what} to {ids.shape[axis]}", hint)
    results = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    if len(results) != 1:
        raise _refuse(f"the traced call returns {len(results)} tensors, not only logits", "call with use_cache=False")
    columns = results[0].meta["example_value"].shape[1]
    if COLUMNS not in at and not (isinstance(columns, torch.SymInt) and columns.node.expr == ids.shape[1].node.expr):
        raise _refuse(
            "the traced call keeps the logits of a number of tokens, not of all",
            "pass logits_to_keep as a tensor of columns, such as torch.tensor([length - 1])",
        )


def _graph_breaks() -> list[str]:
    from torch._dynamo.utils import counters

    return [str(reason).strip().splitlines()[0] for reason in counters["graph_break"]]


def _last_name(node: Node) -> str:
    """``input_ids`` for a placeholder whose source is ``L['kwargs']['input_ids']``."""
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None)
    if source is None or not isinstance(node.meta.get("example_value"), Tensor):
        return ""
    name = source.name if isinstance(source.name, str) else source.name()
    return (re.findall(r"\w+", name) or [""])[-1]


class _Traced(nn.Module):
    """Dynamo's graph as a module of ``(input_ids, position_ids, attention_mask, keep)`` that owns its weights."""

    def __init__(self, traced: GraphModule, placeholders: list[Node], arguments: Sequence, at: dict[str, int]):
        super().__init__()
        self.graph_module = _with_numbers(traced, placeholders, arguments)
        self.at = at
        self.sizes: dict[int, int] = {}  # argument index -> axis of input_ids
        self.numbers: dict[int, int] = {}
        axes = {
            size.node.expr: axis
            for index in at.values()
            for axis, size in enumerate(placeholders[index].meta["example_value"].shape)
            if isinstance(size, torch.SymInt)
        }
        for i, (node, value) in enumerate(zip(placeholders, arguments, strict=True)):
            example = node.meta.get("example_value")
            if i in at.values():
                continue
            if isinstance(value, Tensor):
                kind = self.register_parameter if isinstance(value, nn.Parameter) else self.register_buffer
                kind(f"weight_{i}", value)
            elif isinstance(example, torch.SymInt) and example.node.expr in axes:
                self.sizes[i] = axes[example.node.expr]
            else:
                self.numbers[i] = int(value)
        self.count = len(placeholders)

    def forward(self, input_ids, position_ids, attention_mask, keep):
        given = dict(zip((*INPUTS, COLUMNS), (input_ids, position_ids, attention_mask, keep), strict=True))
        arguments = {index: given[name] for name, index in self.at.items()}
        arguments |= {index: input_ids.shape[axis] for index, axis in self.sizes.items()} | self.numbers
        flat = [arguments[i] if i in arguments else getattr(self, f"weight_{i}") for i in range(self.count)]
        with fx_traceback.preserve_node_meta():  # layers and source lines, for refusals
            (logits,) = Interpreter(self.graph_module).run(*flat)
        return logits


def _with_numbers(traced: GraphModule, placeholders: list[Node], arguments: Sequence) -> GraphModule:
    """A copy in which a Python float that the trace made an input, such as a scale, is a number again."""
    copy = GraphModule(traced, traced.graph.__class__())
    mapping: dict[Node, Node] = {}
    result = copy.graph.graph_copy(traced.graph, mapping)
    copy.graph.output(result)
    for node in copy.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {key: (_module_path(path), kind) for key, (path, kind) in stack.items()}
    for node, value in zip(placeholders, arguments, strict=True):
        if isinstance(value, Tensor) and value.ndim == 0 and not isinstance(value, nn.Parameter):
            for user in list(mapping[node].users):
                if user.op == "call_method" and user.target == "item":
                    _replace_by_number(user, value.item())
    copy.graph.lint()
    copy.recompile()
    return copy


def _module_path(source: str) -> str:
    """``model.layers.0`` of Dynamo's ``L['self'].layers.0``."""
    return "model" + _BASE.sub("", re.sub(r"\._modules\['(\w+)'\]", r".\1", source))


def _replace_by_number(node: Node, number: float) -> None:
    for user in list(node.users):
        user.args = torch.fx.node.map_arg(user.args, lambda arg: number if arg is node else arg)
        user.kwargs = torch.fx.node.map_arg(user.kwargs, lambda arg: number if arg is node else arg)
    node.graph.erase_node(node)
