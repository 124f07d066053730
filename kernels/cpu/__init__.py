"""CPU kernels in C++: attention over a ragged voted cache, and linear layers for a few rows.

The functions trust their arguments: ask ``supports_attend`` or ``supports_linear`` once, call many times.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvpass.kernels.layout import fits

from .build import available, library, why_not

__all__ = [
    "attend",
    "auction",
    "available",
    "best",
    "linear",
    "linears",
    "read_stream",
    "softmax",
    "squares",
    "supports_attend",
    "supports_linear",
    "supports_weights",
    "why_not",
]

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
TILE = 512  # keys per unit of work
MAX_LAYERS = 16  # linears in one call, as in linear.cpp
MAX_LINEAR_ROWS = 8  # beyond this a blocked matrix product wins

# The argument structs of the C++ files: one pointer crosses the boundary instead of 52 values.
_ATTEND_ARGS = struct.Struct("15P 7q 12q 8q 4q 3q 5q 2d")
_COSTS_ARGS = struct.Struct("21P 9q")
_LINEAR_ARGS = struct.Struct("4P 4q 3q q")
_SOFTMAX_ARGS = struct.Struct("5P 5q")


_P = ctypes.c_void_p
_SIGNATURES = {
    "kvpass_attend": [ctypes.c_char_p],
    "kvpass_linears": [ctypes.c_char_p, ctypes.c_int64],
    "kvpass_split_costs": [ctypes.c_char_p],
    "kvpass_softmax": [ctypes.c_char_p],
    "kvpass_squares": [_P, _P, _P, *[ctypes.c_int64] * 4],
    "kvpass_best": [_P, _P, *[ctypes.c_int64] * 3, _P, _P, ctypes.c_int64],
    "kvpass_auction": [_P, _P, ctypes.c_int64, _P, _P, _P, _P, ctypes.c_int64, _P],
}
_RETURNS = {"kvpass_auction": ctypes.c_int64}


@functools.cache
def _function(name: str):
    lib = library()
    if lib is None:
        raise RuntimeError(f"CPU kernels unavailable: {why_not()}")
    function = getattr(lib, name)
    function.argtypes = _SIGNATURES[name]
    function.restype = _RETURNS.get(name, ctypes.c_int)
    return function


def attend(
    q: Tensor,  # [B, Hq, S, Dk]
    k: Tensor,  # [B, Hkv, S, Dk] of the new tokens, as is v [B, Hkv, S, Dv]
    v: Tensor,
    q_pos: Tensor,  # [B, S] int32, -1 = padding
    store_k: Tensor,  # [N, Dk], with store_v [N, Dv] and log_votes [N] fp32
    store_v: Tensor,
    log_votes: Tensor,
    row_start: Tensor,  # [B, Hkv] int64, first entry of each row
    row_len: Tensor,  # [B, Hkv] int32
    tail_k: Tensor,  # [B, Hkv, T, Dk], written to, as is tail_v [B, Hkv, T, Dv]
    tail_v: Tensor,
    tail_pos: Tensor,  # [B, T] int32, -1 = unused
    tail_at: Tensor,  # int64, one element: the slot of the first new token
    scale: float,
    window: int,  # 0 = unlimited
    softcap: float,  # 0 = none
    sinks: Tensor | None = None,  # [Hq] fp32
    chunk: int = 0,  # 0 = none
    writes: bool = True,
    *,
    tile: int = TILE,
) -> Tensor:
    """Attends from the new tokens to store, tail and new tokens, then ``writes`` the new tokens into the tail.

    Returns [B, Hq, S, Dv], a transposed view of contiguous [B, S, Hq, Dv]. New keys and values are attended
    in the dtype they come in; the tail keeps them in its own.
    """
    batch, heads, tokens, key_dim = q.shape
    _, kv_heads, slots, value_dim = tail_v.shape
    row = heads * value_dim
    out = q.new_empty_strided((batch, heads, tokens, value_dim), (tokens * row, value_dim, row, 1))
    arguments = _ATTEND_ARGS.pack(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        q_pos.data_ptr(),
        store_k.data_ptr(),
        store_v.data_ptr(),
        log_votes.data_ptr(),
        row_start.data_ptr(),
        row_len.data_ptr(),
        tail_k.data_ptr(),
        tail_v.data_ptr(),
        tail_pos.data_ptr(),
        tail_at.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        batch,
        heads,
        tokens,
        key_dim,
        kv_heads,
        value_dim,
        slots,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *tail_k.stride(),
        *tail_v.stride(),
        q_pos.stride(0),
        tail_pos.stride(0),
        store_k.stride(0),
        store_v.stride(0),
        TYPES[q.dtype],
        TYPES[store_k.dtype],
        TYPES[tail_k.dtype],
        window,
        chunk,
        writes,
        tile,
        torch.get_num_threads(),
        scale,
        softcap,
    )
    if _function("kvpass_attend")(arguments):
        raise MemoryError("attend: no memory for partial results")
    return out


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """``torch.nn.functional.linear`` of a few rows x [..., K] with each weight [N, K], at most ``MAX_LAYERS``."""
    x = x.contiguous()
    in_features = x.shape[-1]
    rows, threads, kind = x.numel() // in_features, torch.get_num_threads(), TYPES[x.dtype]
    results, packed = [], []
    for weight, bias in zip(weights, biases, strict=True):
        y = x.new_empty((*x.shape[:-1], weight.shape[0]))
        results.append(y)
        packed.append(
            _LINEAR_ARGS.pack(
                x.data_ptr(),
                weight.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                y.data_ptr(),
                rows,
                in_features,
                weight.shape[0],
                in_features,
                kind,
                TYPES[weight.dtype],
                0 if bias is None else TYPES[bias.dtype],
                threads,
            )
        )
    if _function("kvpass_linears")(b"".join(packed), len(packed)):
        raise MemoryError("linears: no memory for a copy of x")
    return results


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`linears` with one weight."""
    return linears(x, (weight,), (bias,))[0]


def supports_attend(*operands: Tensor) -> bool:
    """Whether ``attend`` can take these tensors, as :func:`kvpass.kernels.layout.fits` names them. May compile the
    kernels."""
    return fits(TYPES, torch.device("cpu"), *operands) and available()


def supports_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether ``linear`` can take these tensors and is meant for so few rows. May compile the kernels."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    return (
        all(t.device.type == "cpu" and t.dtype in TYPES for t in tensors)
        and weight.is_contiguous()
        and 0 < x.numel() <= MAX_LINEAR_ROWS * weight.shape[1]
        and (bias is None or bias.is_contiguous())
        and _no_grad(*tensors)
        and available()
    )


def read_stream(data: Tensor) -> float:
    """Reads a contiguous fp32 tensor once with all threads and returns its sum: the kernels' roof."""
    function = library().kvpass_stream
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    function.restype = ctypes.c_float
    return function(data.data_ptr(), data.numel(), torch.get_num_threads())


def supports_weights(*tensors: Tensor) -> bool:
    """Whether ``softmax``, ``squares`` and ``best`` can take these. May compile the kernels."""
    return (
        all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors) and _no_grad(*tensors) and available()
    )


def softmax(logits: Tensor, pos: Tensor | None, q_pos: Tensor) -> tuple[Tensor, Tensor]:
    """Turns ``logits`` [R, N, W], W a multiple of 16, into exponentials relative to the largest over N, in place.

    ``pos`` [R, N] int32 hides entries after a query's ``q_pos`` [R, W] int32; a query at -1 sees nothing. Returns
    their sum over N [R, W], 1 for a query that sees nothing, and the log of the denominator, +inf for that one.
    """
    rows, entries, columns = logits.shape
    total, log_z = logits.new_empty(2, rows, columns)
    q_pos = q_pos.contiguous()
    arguments = _SOFTMAX_ARGS.pack(
        logits.data_ptr(),
        0 if pos is None else pos.data_ptr(),
        q_pos.data_ptr(),
        total.data_ptr(),
        log_z.data_ptr(),
        rows,
        entries,
        0 if pos is None else pos.stride(0),
        columns,
        torch.get_num_threads(),
    )
    if _function("kvpass_softmax")(arguments):
        raise MemoryError("softmax: no memory for partial results")
    return total, log_z


def squares(mass: Tensor, scale: Tensor, total: Tensor) -> None:
    """Adds to ``total`` [R, N] the sum over W of ``mass`` [R, N, W] squared times ``scale`` [R, W]."""
    pointers = (mass.data_ptr(), scale.data_ptr(), total.data_ptr())
    _function("kvpass_squares")(*pointers, *mass.shape, torch.get_num_threads())


def best(x: Tensor, barred: Tensor | None) -> tuple[Tensor, Tensor]:
    """Largest of ``x`` [R, E, C] along C and the first place it stands at; ``barred`` [R, 1, C] is added first."""
    most, place = x.new_empty(x.shape[:-1]), torch.empty(x.shape[:-1], dtype=torch.int64)
    bar = 0 if barred is None else barred.data_ptr()
    sizes = (most.numel(), x.shape[1], x.shape[2])
    _function("kvpass_best")(x.data_ptr(), bar, *sizes, most.data_ptr(), place.data_ptr(), torch.get_num_threads())
    return most, place


def _no_grad(*tensors: Tensor) -> bool:
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def auction(offer, state: np.ndarray, budget: int) -> tuple[np.ndarray, int, float]:
    """The heap of :func:`kvpass.kernels.auction.auction`."""
    state, least = state.copy(), np.empty(1)
    arrays = [np.ascontiguousarray(x) for x in (offer.roots, offer.added, offer.first, offer.count, offer.split)]
    roots, added, first, count, split = (x.ctypes.data for x in arrays)
    left = _function("kvpass_auction")(
        roots, added, len(arrays[0]), first, count, split, state.ctypes.data, budget, least.ctypes.data
    )
    if left < 0:
        raise MemoryError("auction: no memory for the offers")
    return state, left, float(least[0])


def split_costs(tensors: Sequence[Tensor], cost: Tensor, coherent: bool) -> None:
    """Writes to ``cost`` [n, 2 K] what :func:`kvpass.kernels.prototype.split_costs` returns.

    ``tensors`` are those of prototype.cpp's ``Args``, in order up to ``begins``, contiguous fp32 and int64.
    """
    k, _, v, _, _, probes, *_ = tensors
    first, ends = tensors[11], tensors[18]
    arguments = _COSTS_ARGS.pack(
        *(x.data_ptr() for x in tensors),
        cost.data_ptr(),
        k.shape[1],
        k.shape[2],
        v.shape[2],
        probes.shape[1],
        first.shape[0],
        ends.shape[0],
        ends.shape[1],
        coherent,
        torch.get_num_threads(),
    )
    if _function("kvpass_split_costs")(arguments):
        raise MemoryError("split_costs: no memory for sums")
