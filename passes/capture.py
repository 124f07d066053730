"""Trace a decoder once, without a cache, into one functional ATen graph with dynamic batch and length.

A graph captured without a cache computes token-local functions around its attentions, so the same graph runs a whole
prompt or one token once each attention owns its keys and values.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export
from torch.fx import GraphModule

from kvpass.passes.functional import functional
from kvpass.passes.spec import Captured, Refusal, UnsupportedModelError

# Primes that no configuration uses as a dimension, so that no two symbols are unified by accident.
SAMPLE_BATCH, SAMPLE_LENGTH, SAMPLE_KEEP = 2, 17, 3

# What torch.export says, and what it means to someone who did not write the model.
REASONS = {
    "Constraints violated": "its code fixes the batch or the length, as a loop over the tokens does",
    "data-dependent expression": "its code branches on what it computes, as a loop over the experts that were hit does",
}


class _Cacheless(nn.Module):
    """Calls the model the way every later pass assumes: no cache, explicit positions and padding mask."""

    def __init__(self, model: nn.Module, positions: bool, keep: bool):
        super().__init__()
        self.model, self.positions, self.keeps = model, positions, keep

    def forward(self, input_ids, position_ids, attention_mask, keep):
        arguments = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        if self.positions:
            arguments["position_ids"] = position_ids
        if self.keeps:
            arguments["logits_to_keep"] = keep
        output = self.model(**arguments)
        logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
        if logits is None:
            logits = output[0]
        return logits


def _refuse(reason: str, hint: str = "") -> UnsupportedModelError:
    return UnsupportedModelError((Refusal(reason=reason, hint=hint),))


def check_decoder(model: nn.Module) -> inspect.Signature:
    """The signature of a decoder's forward.

    Raises:
        TypeError: not a module.
        UnsupportedModelError: an encoder-decoder, or a module that takes no input_ids.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module that decodes text, got {type(model).__name__}")
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise _refuse("is an encoder-decoder, and only decoders are supported")
    signature = inspect.signature(model.forward)
    if "input_ids" not in signature.parameters:
        raise _refuse("is not a decoder: its forward takes no input_ids")
    if not any(parameter.ndim >= 2 for parameter in model.parameters()):
        raise _refuse("is not a decoder: it has no weights")
    return signature


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients; every module gets its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def capture(model: nn.Module) -> Captured:
    """Export ``model`` without a cache.

    Raises:
        UnsupportedModelError: not a decoder, or torch.export cannot trace it; the message has export's own reason.
    """
    signature = check_decoder(model)
    positions, keeps = ("position_ids" in signature.parameters, "logits_to_keep" in signature.parameters)
    try:
        return export_decoder(_Cacheless(model, positions, keeps))
    except UnsupportedModelError:
        if not keeps:
            raise
        return export_decoder(_Cacheless(model, positions, keep=False))  # it takes a number only, not columns


def export_decoder(wrapper: nn.Module) -> Captured:
    """The graph of ``wrapper(input_ids, position_ids, attention_mask, keep) -> logits``, batch and length dynamic.

    Raises:
        UnsupportedModelError: torch.export cannot trace it, or fixes a size.
    """
    module = _export(wrapper)
    placeholders = {node.target: node for node in module.graph.nodes if node.op == "placeholder"}
    symbols = _symbols(placeholders)
    _redirect_lengths(module, placeholders)
    return Captured(module, tuple(placeholders), symbols)


def _export(wrapper: nn.Module) -> GraphModule:
    device = next(wrapper.parameters()).device
    ids = torch.ones(SAMPLE_BATCH, SAMPLE_LENGTH, dtype=torch.int64, device=device)
    positions = torch.arange(SAMPLE_LENGTH, device=device).expand(SAMPLE_BATCH, -1).contiguous()
    keep = torch.arange(SAMPLE_KEEP, device=device)
    tokens = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    shapes = {"input_ids": tokens, "position_ids": tokens, "attention_mask": tokens, "keep": {0: Dim.DYNAMIC}}
    # Standard error is held back because torch.export prints its whole partial graph there when it fails.
    with evaluating(wrapper), warnings.catch_warnings(), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore", FutureWarning)  # about torch's own internals
        try:
            program = export(wrapper, (ids, positions, torch.ones_like(ids), keep), dynamic_shapes=shapes, strict=False)
            module = unlifted(program)
            return module if functional(module.graph) else unlifted(program.run_decompositions({}))
        except Exception as error:
            text = str(error).strip().splitlines() or [type(error).__name__]
            known = next((reason for words, reason in REASONS.items() if words in text[0]), None)
            if known:
                raise _refuse(known) from error
            raise _refuse(f"torch.export cannot trace it: {text[0].strip()}") from error


def unlifted(program: ExportedProgram) -> GraphModule:
    """The module of ``program`` without checks of its inputs."""
    # Guards would keep the padding mask alive after rewriting; the graph is ours and checked by translation.
    takes = "check_guards" in inspect.signature(program.module).parameters
    return program.module(check_guards=False) if takes else program.module()


def _symbols(placeholders: dict) -> dict[object, str]:
    axes = {name: ("keep",) if name == "keep" else ("batch", "length") for name in placeholders}
    symbols = {}
    for name, node in placeholders.items():
        for axis, size in zip(axes[name], node.meta["val"].shape, strict=True):
            if isinstance(size, torch.SymInt):
                symbols[size.node.expr] = axis  # the mask may carry a symbol of its own, equal by construction
            elif name == "input_ids":
                raise _refuse(f"torch.export fixed the {axis} of its input to the traced {size}")
    return symbols


def _redirect_lengths(module: GraphModule, placeholders: dict) -> None:
    """Take every size from input_ids: export reads the query length from the mask's width."""
    source = placeholders["input_ids"]
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.sym_size.int:
            owner, axis = node.args
            if owner.op == "placeholder" and owner.target in ("attention_mask", "position_ids"):
                node.args = (source, axis)
    module.recompile()
