"""The one place that knows how transformers releases differ."""

from __future__ import annotations

import dataclasses
import inspect
from functools import cache

from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE_NAMES = ("cache", "past_key_values")  # renamed in transformers 5.24


@cache
def cache_field() -> str:
    """Name under which outputs carry the cache and ``generate`` takes it."""
    fields = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
    return next(name for name in CACHE_NAMES if name in fields)


def names_cache(signature: inspect.Signature) -> bool:
    """Whether a forward of that signature names a cache. ``generate`` calls one that does not with all tokens."""
    return any(name in signature.parameters for name in CACHE_NAMES)


def take_cache(arguments: dict):
    """Remove the cache from keyword arguments under any of its names and return it, or None."""
    given = [arguments.pop(name) for name in CACHE_NAMES if arguments.get(name) is not None]
    for name in CACHE_NAMES:
        arguments.pop(name, None)
    return given[0] if given else None
