"""Compile a Hugging Face decoder onto a compressed, physically ragged KV cache.

>>> model = kvpass.compile(model, budget=0.1)
>>> model.generate(**inputs, max_new_tokens=64)
>>> print(model.kvpass.report())
"""

from __future__ import annotations

from importlib import import_module

_HOMES = {
    "compile": "kvpass.compiler",
    "explain": "kvpass.compiler",
    "Refresh": "kvpass.refresh",
    "RaggedCache": "kvpass.cache",
    "CacheError": "kvpass.cache",
    "load_cache": "kvpass.saved",
    "InputError": "kvpass.binding",
    "KVPassError": "kvpass.passes.spec",
    "UnsupportedModelError": "kvpass.passes.spec",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvpass' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
