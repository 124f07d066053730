"""A cache as a safetensors file: resume a conversation, or answer questions about a document compressed earlier."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kvpass.cache import CacheError, RaggedCache, Tail
from kvpass.full import Full
from kvpass.kernels.layout import Store
from kvpass.passes.spec import LayerSpec
from kvpass.runtime import Runtime

SCHEMA = 1
UNSAVED = "a saved cache leaves out the full keys and values that refreshing reads; loaded, it goes on unrefreshed"
_SAMPLES = 64  # values of each weight that enter the fingerprint


def save(cache: RaggedCache, path: str | os.PathLike, tokens=None, tokenizer=None) -> None:
    """Write ``cache`` to ``path`` (safetensors), whole or not at all.

    ``tokens``, the ids of each sequence without padding, and their ``tokenizer`` put the text into the file as well,
    for ``kvpass view``. Ids beyond what the cache has seen are left out, such as the last one of ``generate``. What
    a cache keeps outside for refreshing is left out too, with a warning.

    Raises:
        CacheError: the cache is empty, or in the middle of a prompt, or has seen other tokens than these.
        OSError: the file cannot be written.
    """
    if cache.seen is None:
        raise CacheError("the cache is empty; there is nothing to save")
    if cache.pending or cache.prompt_end is not None:
        raise CacheError("the cache is in the middle of a prompt; save it when the prompt is through")
    if cache.full is not None and not cache.full.stopped:
        warnings.warn(UNSAVED, RuntimeWarning, stacklevel=3)
    pieces = _pieces(cache, tokens, tokenizer)
    tensors = {name: tensor.contiguous() for name, tensor in _named(cache).items()}
    facts = {
        "schema": SCHEMA,
        "model": fingerprint(cache.owner),
        "layers": [_sizes(layer) for layer in cache.specs],
        "columns": cache.columns,
        "padded": cache.padded,
        "spare_slots": cache.spare_slots,
        "cursors": {str(window): tail.cursor for window, tail in cache.tails.items()},
        "digest": _digest(tensors),
    } | ({} if pieces is None else {"pieces": pieces})
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata={"kvpass": json.dumps(facts)})
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _pieces(cache: RaggedCache, tokens, tokenizer) -> list[list[str]] | None:
    """The text of every token that each sequence of the cache has seen."""
    if tokens is None and tokenizer is None:
        return None
    if tokens is None or tokenizer is None:
        raise CacheError("the text of a cache is saved from tokens= and tokenizer= together")
    if cache.padded and isinstance(tokens, Tensor):
        raise CacheError("this cache has seen padding; give tokens= as one list of ids a sequence, without padding")
    seen, rows = cache.seen.tolist(), tokens.tolist() if isinstance(tokens, Tensor) else tokens
    if len(rows) != len(seen) or any(len(row) < count for row, count in zip(rows, seen, strict=True)):
        raise CacheError(f"the cache has seen {seen} tokens, tokens= has {[len(row) for row in rows]}")
    return [[tokenizer.decode([token]) for token in row[:count]] for row, count in zip(rows, seen, strict=True)]


def load_cache(path: str | os.PathLike, model: nn.Module) -> RaggedCache:
    """Read a cache that :func:`save` wrote, for the compiled ``model``.

    Raises:
        CacheError: the file is no saved cache, is truncated or changed, or belongs to another model, precision or
            rotary embedding.
    """
    handle = getattr(model, "kvpass", None)
    if handle is None:
        raise CacheError("load_cache needs a model made by kvpass.compile")
    runtime: Runtime = handle.runtime
    facts, tensors = read(path)
    if facts["model"] != fingerprint(runtime):
        raise CacheError(f"{path}: was saved from a model with other weights, precision or rotary embedding")
    cache = handle.new_cache()
    if facts["layers"] != [_sizes(layer) for layer in cache.specs]:
        raise CacheError(f"{path}: was saved from a model with other layers")
    try:
        _restore(cache, facts, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise CacheError(f"{path}: is not a complete saved cache ({error})") from error
    if cache.keys[0].dtype != runtime.dtype:
        raise CacheError(f"{path}: stores {cache.keys[0].dtype}, the model is compiled for {runtime.dtype}")
    return cache


def _sizes(layer: LayerSpec) -> dict:
    """What a stored layer has to agree in; how its keys turn follows from the buffers in :func:`fingerprint`."""
    derived = ("turns", "frame", "out", "hidden")
    return {name: value for name, value in vars(layer).items() if name not in derived}


def fingerprint(runtime: Runtime) -> str:
    """Identifies weights and buffers (rotary frequencies among them) by name, shape, dtype and sampled values."""
    module = runtime.step.module
    return digest_tensors([*module.named_parameters(), *module.named_buffers()])


def digest_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """Hash of names, shapes, dtypes and sampled values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda item: item[0]):
        flat = tensor.detach().flatten()
        sample = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous().cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(_bytes(sample))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}".encode())
        digest.update(_bytes(tensors[name]))
    return digest.hexdigest()


def _named(cache: RaggedCache) -> dict[str, Tensor]:
    found = {"seen": cache.seen}
    for window, tail in cache.tails.items():
        found[f"tail.{window}.pos"] = tail.pos
    for index, store in enumerate(cache.stores):
        found |= {f"{index}.{name}": tensor for name, tensor in store.tensors().items()}
        found |= {f"{index}.tail_k": cache.keys[index], f"{index}.tail_v": cache.values[index]}
    return found


def read(path: str | os.PathLike) -> tuple[dict, dict[str, Tensor]]:
    """The facts and the tensors of a file that :func:`save` wrote; CacheError when it is no such file."""
    try:
        with safe_open(str(path), framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("kvpass", "null"))
            if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
                raise CacheError(f"{path}: is not a cache saved by this version of kvpass")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise CacheError(f"{path}: no such file") from None
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, CacheError):
            raise
        raise CacheError(f"{path}: is truncated or not a safetensors file ({error})") from error
    if facts.get("digest") != _digest(tensors):
        raise CacheError(f"{path}: was changed after it was saved")
    return facts, tensors


def _restore(cache: RaggedCache, facts: dict, tensors: dict[str, Tensor]) -> None:
    device = next(cache.owner.step.module.parameters()).device
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    cache.seen = tensors["seen"]
    cache.columns, cache.padded = int(facts["columns"]), bool(facts["padded"])
    cache.spare_slots = int(facts["spare_slots"])
    if (refresh := cache.owner.refresh) is not None:
        cache.full = Full(refresh.where, refresh.limit)
        cache.full.stopped = "loaded from a file, which has no full keys and values"
    for layer in cache.specs:
        if layer.window not in cache.tails:
            pos = tensors[f"tail.{layer.window}.pos"]
            cache.tails[layer.window] = Tail(layer.window, pos, int(facts["cursors"][str(layer.window)]))
    for index in range(len(cache.specs)):
        fields = {name: tensors.get(f"{index}.{name}") for name in Store.__dataclass_fields__}
        if absent := [name for name, tensor in fields.items() if tensor is None and name != "ema"]:
            raise KeyError(f"{index}.{absent[0]}")
        store = Store(**fields)
        ends = store.row_start + store.row_len
        if bool((store.row_len < 0).any()) or bool((store.row_start < 0).any()) or int(ends.max()) > store.k.shape[0]:
            raise ValueError(f"rows of layer {index} lie outside its store")
        cache.stores.append(store)
        cache.keys.append(tensors[f"{index}.tail_k"])
        cache.values.append(tensors[f"{index}.tail_v"])
