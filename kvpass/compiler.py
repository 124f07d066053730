"""``compile`` and ``explain``: the pipeline from a model to programs, and the checks around it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.fx import GraphModule

from kvpass import policies, startup
from kvpass.binding import Handle, bind
from kvpass.budget import Budget
from kvpass.compression import Compress
from kvpass.crosscheck import crosschecked
from kvpass.lowering import BACKENDS, Lowering
from kvpass.passes.capture import capture, check_decoder, evaluating
from kvpass.passes.classify import classify
from kvpass.passes.clean import clean
from kvpass.passes.dump import script
from kvpass.passes.find import find
from kvpass.passes.hooks import insert_hooks, return_queries
from kvpass.passes.inputs import inputs
from kvpass.passes.locality import check_locality
from kvpass.passes.normalize import normalize
from kvpass.passes.plan import plan
from kvpass.passes.rewrite import rewrite
from kvpass.passes.spec import Captured, Plan, Program, UnsupportedModelError
from kvpass.passes.verify import compare
from kvpass.refresh import Refresh
from kvpass.report import Report
from kvpass.runtime import Runtime
from kvpass.settings import Settings

# Analysis annotates: Captured -> Plan -> Plan; nothing here edits what the graph computes.
ANALYSIS: tuple[Callable, ...] = (normalize, find, classify, plan, check_locality, inputs)


def explain(model: nn.Module) -> Report:
    """What :func:`compile` would do, one row a layer. The model is not changed.

    Raises:
        UnsupportedModelError: the model cannot be traced at all, so there is no layer to report on.
    """
    model = _original(model)
    found = _analyse(capture(model))
    return crosschecked(Report.of(found), model, found.sites)


def compile(
    model: nn.Module,
    budget: float | int = 0.1,
    policy: str | policies.Policy = "unified",
    *,
    decode_budget: float | int | None = None,
    refresh: int | Refresh | None = None,
    kv_dtype: str | None = None,
    backend: str = "inductor",
) -> nn.Module:
    """A model of the same class over the same weights whose KV cache is compressed after each prompt.

    Args:
        model: a decoder; its source, its weights and the object itself stay as they are.
        budget: a float in (0, 1] keeps that fraction of the prompt's cache entries, an int keeps that many entries
            per (layer, KV head) on average. It counts the rows of full-attention layers; sliding-window layers keep
            exactly their window. 1.0 is exact.
        policy: a name of ``kvpass.policies.names()`` or a policy object.
        decode_budget: how much stays while decoding, in the same units; None lets the cache grow by one entry a row
            and token. Rows are compressed again whenever they are 32 entries above it.
        refresh: every so many decoded tokens rows are rebuilt from the full keys and values, to ``decode_budget`` or
            else ``budget``; a :class:`kvpass.Refresh` says where those are kept meanwhile, and how large they may
            get. That step runs on the full cache. None keeps no such copy.
        kv_dtype: ``"bf16"``, ``"fp16"`` or ``"fp32"`` for the stored keys and values; None keeps the model's own.
            Attention computes in fp32 on what is stored, log-votes are always fp32, and the prompt's own attention
            sees its keys unrounded. Below the model's precision budget 1 is no longer exact.
        backend: ``"inductor"`` lowers the one-token program, ``"eager"`` runs the graphs as they are.

    Raises:
        UnsupportedModelError: the model cannot be rewritten soundly; says which layer, node and source line.
        ValueError: a budget, policy, backend or refresh that does not exist.
    """
    settings = Settings.parse(budget, policy, decode_budget, kv_dtype, backend, refresh)
    model = _original(model)
    checked = _checked(model)
    return bind(model, _programs(checked, settings, next(model.parameters()).dtype), checked.report)


def runtime_of(
    captured: Captured,
    budget: float | int = 0.1,
    policy: str | policies.Policy = "unified",
    *,
    decode_budget: float | int | None = None,
    kv_dtype: str | None = None,
    lower_with: str = "inductor",
) -> Runtime:
    """The programs of a decoder that another front-end captured, validated against the captured graph itself.

    Raises:
        UnsupportedModelError, ValueError: as :func:`compile`.
    """
    settings = Settings.parse(budget, policy, decode_budget, kv_dtype, lower_with)
    model = _AsModel(captured)
    step, report = _rewritten(captured, model)
    _validate(model, step)
    return _programs(Checked((), report, step, {}), settings, next(model.parameters()).dtype)


@dataclass(frozen=True)
class Checked:
    """A model that was analysed, rewritten and validated; every budget and policy over it shares this."""

    fingerprint: tuple
    report: Report
    step: Program
    # backend, returns queries, stored dtype -> batch -> callable
    lowered: dict[tuple[str, bool, torch.dtype], dict[int, Callable]]


_CHECKED: weakref.WeakKeyDictionary[nn.Module, Checked] = weakref.WeakKeyDictionary()


def _checked(model: nn.Module) -> Checked:
    """The validated step program of ``model``, made once as long as its weights and settings stay the same objects."""
    check_decoder(model)
    fingerprint = _fingerprint(model)
    known = _CHECKED.get(model)
    if known is not None and known.fingerprint == fingerprint:
        return known
    entry = startup.entry(model)
    stored = startup.load(entry, model)
    if stored is not None:
        try:
            _validate(model, stored[0])
        except UnsupportedModelError:
            stored = None  # not this model's program after all
    step, report = stored or _rewritten(capture(model), model)
    if stored is None:
        _validate(model, step)
        startup.store(entry, model, step, report)
    _CHECKED[model] = made = Checked(fingerprint, report, step, {})
    return made


def _programs(checked: Checked, settings: Settings, own: torch.dtype) -> Runtime:
    """Prefill and step program of one budget and policy."""
    compress = Compress(checked.step, settings.policy, settings.budget)
    prefill = insert_hooks(checked.step, compress, compress.taps)
    _dump(8, "hooks", prefill)
    step, maintain, bound = checked.step, None, settings.decode_budget
    observes = bound is not None or settings.refresh is not None
    if observes:
        step = return_queries(step)
        maintain = Compress(step, settings.policy, bound or settings.budget, decoding=True)
    dtype = settings.kv_dtype or own
    if dtype.itemsize < 4 and any(layer.position_channels for layer in step.layers):
        raise ValueError(f"kv_dtype {dtype} cannot hold the positions that this model's ALiBi keeps in its keys")
    done = checked.lowered.setdefault((settings.backend, observes, dtype), {})
    lower = Lowering(step, BACKENDS[settings.backend], dtype, done)
    rehearsal = return_queries(checked.step) if settings.policy.wants == "rehearsal" else None
    return replace(
        _runtime(prefill, step, settings.policy, lower, maintain, rehearsal),
        bounded=bound is not None,
        refresh=settings.refresh,
    )


class _AsModel(nn.Module):
    """A captured graph called like a model."""

    def __init__(self, captured: Captured):
        super().__init__()
        self.graph_module = captured.module

    def train(self, mode: bool = True) -> nn.Module:
        return self  # a graph has one mode, the one it was traced in

    def forward(self, input_ids, attention_mask, position_ids, use_cache=False):
        keep = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.graph_module(input_ids, position_ids, attention_mask, keep)


def _validate(model: nn.Module, step: Program) -> None:
    """Check ``step`` against the untouched model, keeping everything."""
    policy, budget = policies.get("streaming"), Budget.parse(1.0)
    prefill = insert_hooks(step, Compress(step, policy, budget))
    lower = Lowering(step, BACKENDS["eager"], next(model.parameters()).dtype, {})
    exact = _runtime(prefill, step, policy, lower)
    with evaluating(model):
        compare(model, lambda *inputs: _split(exact, *inputs), step.layers)


def _rewritten(captured: Captured, model: nn.Module) -> tuple[Program, Report]:
    found = _analyse(captured)
    if found.refusals:
        raise UnsupportedModelError(found.refusals)
    return _dump(7, "rewrite", clean(rewrite(found))), crosschecked(Report.of(found), model, found.sites)


def _fingerprint(model: nn.Module) -> tuple:
    config = getattr(model, "config", None)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return (
        getattr(config, "_attn_implementation", None),
        tuple((name, id(tensor), tensor.dtype, tensor.device, tuple(tensor.shape)) for name, tensor in tensors),
    )


def _runtime(
    prefill: Program,
    step: Program,
    policy: policies.Policy,
    lower: Lowering,
    maintain: Compress | None = None,
    rehearsal: Program | None = None,
) -> Runtime:
    return Runtime(
        layers=step.layers,
        prefill=prefill,
        step=step,
        policy=policy,
        lower=lower,
        dtype=lower.dtype,
        takes_keep=any(node.target == "keep" and node.users for node in step.module.graph.nodes),
        maintain=maintain,
        rehearsal=rehearsal,
    )


def _original(model: nn.Module) -> nn.Module:
    handle = getattr(model, "kvpass", None)
    return handle.original if isinstance(handle, Handle) else model


def _analyse(captured: Captured) -> Plan:
    state: Captured | Plan = captured
    _dump(0, "capture", state)
    for number, analysis in enumerate(ANALYSIS, start=1):
        state = _dump(number, analysis.__name__, analysis(state))
    _dump_refused(state)
    return state


def _dump(number: int, name: str, state):
    """Write the graph as it is after a pass, when KVPASS_DUMP names a directory."""
    if directory := os.environ.get("KVPASS_DUMP"):
        module: GraphModule = state.module if isinstance(state, (Captured, Program)) else state.captured.module
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        notes = "".join(f"# {line}\n" for line in str(Report.of(state)).splitlines()) if isinstance(state, Plan) else ""
        (path / f"{number:02d}_{name}.py").write_text(notes + module.code)
    return state


def _dump_refused(plan: Plan) -> None:
    """Write a script of every refused layer's attention, when KVPASS_DUMP names a directory."""
    if directory := os.environ.get("KVPASS_DUMP"):
        for refusal in plan.refusals:
            if text := script(plan.captured, refusal):
                (Path(directory) / f"refused_{refusal.layer}.py").write_text(text)


def _split(runtime: Runtime, ids: torch.Tensor, padding: torch.Tensor, steps: int) -> torch.Tensor:
    """Logits [B, S, V] of a prompt without its last ``steps`` tokens, then those one by one, through one cache."""
    cache = runtime.new_cache()
    length = ids.shape[1] - steps
    positions = (padding.cumsum(-1) - 1).clamp(min=0)
    first = runtime.run(
        cache,
        ids[:, :length],
        padding[:, :length].bool(),
        positions[:, :length],
        torch.arange(length, device=ids.device),
    )
    rest = [
        runtime.run(
            cache,
            ids[:, i : i + 1],
            None,
            positions[:, i : i + 1],
            torch.zeros(1, dtype=torch.int64, device=ids.device),
        )
        for i in range(length, ids.shape[1])
    ]
    return torch.cat([first, *rest], 1)
