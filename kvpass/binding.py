"""Give a compiled model the interface of the model it came from.

The result is an object of the same class over the same weights, with its own ``forward`` and ``generate``. The
original, its class and the transformers library are left as they are.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass, field
from functools import wraps

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvpass import versions
from kvpass.cache import CacheError, RaggedCache
from kvpass.passes.spec import KVPassError
from kvpass.report import CacheReport, Report
from kvpass.runtime import Runtime

# What training and introspection ask for; the original forward answers those.
ORIGINAL_ONLY = ("labels", "output_attentions", "output_hidden_states")


class InputError(KVPassError, ValueError):
    """An input that cannot be run; nothing was changed."""


@dataclass
class Handle:
    """``model.kvpass``: what was compiled, and what the last cache holds."""

    original: nn.Module
    runtime: Runtime
    plan: Report
    _last: weakref.ref | None = field(default=None, repr=False)
    _finished: CacheReport | None = field(default=None, repr=False)

    def new_cache(self) -> RaggedCache:
        """An empty cache to pass to ``model(...)`` or ``model.generate(...)``."""
        return self.runtime.new_cache()

    def note(self, cache: RaggedCache) -> None:
        """Remember a cache for :meth:`report`, without keeping it alive."""
        self._last = weakref.ref(cache)

    def finish(self, cache: RaggedCache) -> None:
        """Keep the figures of a cache that is about to be dropped."""
        if cache.seen is not None:
            self._finished, self._last = CacheReport.of(cache, self.plan), None

    def report(self, cache: RaggedCache | None = None) -> CacheReport | Report:
        """Entries, bytes, votes and times of ``cache`` (default: the last one used), or the plan before any use."""
        live = cache if cache is not None else (self._last() if self._last else None)
        if live is not None and live.seen is not None:
            return CacheReport.of(live, self.plan)
        return self._finished or self.plan


def bind(model: nn.Module, runtime: Runtime, plan: Report) -> nn.Module:
    """An object of ``model``'s class that shares its modules and runs ``runtime``."""
    twin = object.__new__(type(model))
    twin.__dict__ = dict(model.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[name] = dict(model.__dict__[name])
    handle = Handle(model, runtime, plan)
    twin.__dict__["kvpass"] = handle
    twin.__dict__["forward"] = _forward(model, handle)
    if hasattr(model, "generate"):
        twin.__dict__["generate"] = _generate(model, twin, handle)
    return twin


def _forward(model: nn.Module, handle: Handle):
    original = model.forward
    signature = inspect.signature(original)

    @wraps(original)
    def forward(*args, **kwargs):
        separate = None if versions.names_cache(signature) else versions.take_cache(kwargs)
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        arguments.update(arguments.pop(_keywords(signature), {}) or {})
        given = dict(arguments)
        cache = versions.take_cache(arguments) if separate is None else separate
        if _for_original(model, arguments, cache):
            if isinstance(cache, RaggedCache):
                raise InputError(
                    "labels, output_attentions, output_hidden_states and use_cache=False are answered by the original "
                    "forward, which cannot read a compressed cache; leave them out or pass no cache"
                )
            return original(**given)
        return _cached_forward(model, handle, cache, **arguments)

    forward.__signature__ = signature
    return forward


def _keywords(signature: inspect.Signature) -> str:
    names = [p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    return names[0] if names else ""


def _for_original(model: nn.Module, arguments: dict, cache) -> bool:
    config = getattr(model, "config", None)
    if any(arguments.get(name) is not None and arguments[name] is not False for name in ORIGINAL_ONLY):
        return True
    use_cache = arguments.get("use_cache")
    if use_cache is None:
        use_cache = cache is not None or getattr(config, "use_cache", True)
    trains = model.training or (torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()))
    return not use_cache or (trains and cache is None)


def _cached_forward(
    model,
    handle: Handle,
    cache,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    logits_to_keep: int | Tensor = 0,
    return_dict: bool | None = None,
    inputs_embeds: Tensor | None = None,
    **ignored,
):
    if inputs_embeds is not None:
        raise InputError(
            "inputs_embeds is not supported by a compiled model; pass input_ids, or use the original model"
        )
    cache = _own_cache(handle, cache)
    padding = _check(model, handle, cache, input_ids, attention_mask)
    length = input_ids.shape[1]
    keep = _columns(logits_to_keep, length, input_ids.device)
    if position_ids is not None:
        position_ids = position_ids[:, -length:].expand(input_ids.shape[0], -1)
    logits = handle.runtime.run(cache, input_ids, padding, position_ids, keep)
    handle.note(cache)
    if return_dict is False:
        return logits, cache
    return CausalLMOutputWithPast(logits=logits, **{versions.cache_field(): cache})


def _own_cache(handle: Handle, cache) -> RaggedCache:
    if cache is None:
        return handle.new_cache()
    if isinstance(cache, RaggedCache):
        if cache.owner is not handle.runtime:
            raise CacheError("this cache was made by another compiled model")
        return cache
    if type(cache) is DynamicCache and cache.get_seq_length() == 0:
        return handle.new_cache()
    kind, seen = type(cache).__name__, cache.get_seq_length() if isinstance(cache, Cache) else 0
    raise CacheError(
        f"a compiled model keeps its own cache and cannot continue from a {kind} with {seen} tokens; "
        "pass model.kvpass.new_cache(), or nothing"
    )


def _check(model, handle: Handle, cache: RaggedCache, input_ids, attention_mask) -> Tensor | None:
    """Refuse what cannot be run; the padding of the new tokens [B, S], None when there is none."""
    if input_ids is None or input_ids.ndim != 2:
        raise InputError("input_ids must be [batch, length] token ids")
    if input_ids.numel() == 0:
        raise InputError("the prompt is empty; give at least one token")
    length, limit = input_ids.shape[1], _positions_limit(model)
    if length > 1 and limit is not None and cache.columns + length > limit:
        raise InputError(f"the prompt has {cache.columns + length} tokens, and the model has only {limit} positions")
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise InputError("attention_mask must be [batch, length]; the compiled graph makes its own causal mask")
    if attention_mask.shape[1] < length:
        raise InputError(f"attention_mask covers {attention_mask.shape[1]} tokens, the input has {length}")
    padding = attention_mask[:, -length:].to(torch.bool)
    if bool(padding.all()):
        return None
    if not bool(padding.any(-1).all()):
        raise InputError("a sequence of the batch is only padding; give every sequence at least one token")
    return padding


def _positions_limit(model) -> int | None:
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None)


def _columns(logits_to_keep: int | Tensor, length: int, device) -> Tensor:
    if isinstance(logits_to_keep, Tensor):
        return logits_to_keep.to(device)
    first = max(0, length - logits_to_keep) if logits_to_keep else 0
    return torch.arange(first, length, device=device)


def _prompt_columns(args: tuple, kwargs: dict) -> int | None:
    """Columns that the cache will have seen after the prompt, a cache's earlier ones included."""
    mask = kwargs.get("attention_mask")
    given = [args[0] if args else None, kwargs.get("inputs"), kwargs.get("input_ids"), mask]
    widths = [value.shape[1] for value in given if isinstance(value, Tensor) and value.ndim == 2]
    return max(widths, default=None)


def _generate(model, twin, handle: Handle):
    original = type(model).generate

    @wraps(original)
    def generate(*args, **kwargs):
        if not versions.names_cache(inspect.signature(model.forward)):
            return original(model, *args, **kwargs)  # runs all tokens at every step and has no place for a cache
        config = kwargs.get("generation_config") or model.generation_config
        implementation = kwargs.get("cache_implementation") or getattr(config, "cache_implementation", None)
        if implementation not in (None, "dynamic", "dynamic_full"):
            raise InputError(
                f"cache_implementation={implementation!r} is not possible on a compiled model, which has its own cache"
            )
        cache = versions.take_cache(kwargs)
        if kwargs.get("use_cache", config.use_cache) is not False:
            cache = _own_cache(handle, cache)
        if cache is not None:
            kwargs[versions.cache_field()] = cache
            cache.prompt_end = _prompt_columns(args, kwargs)
        try:
            return original(twin, *args, **kwargs)
        finally:
            if cache is not None:
                cache.prompt_end = None
                cache.stop_recording()
                handle.finish(cache)

    generate.__signature__ = inspect.signature(model.generate)
    return generate
