"""Plans from shapes alone and launches. Under ``TRITON_INTERPRET=1`` it takes CPU tensors."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.kernels.triton.decode import merge_and_append, store_softmax, tail_softmax
from kvpass.kernels.triton.probe import column_sums, probe_lse

LOG2E = 1.4426950408889634
UNBOUNDED = 1 << 30  # a window or chunk that holds every position
MAX_QUERIES = 16  # rows of one tile, the least of a matrix instruction: more would not leave registers for values
PARTIALS = 16  # read at once by the second pass
_TL = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class Config:
    """How keys are cut: ``chunk`` keys a program, ``block`` at a time."""

    chunk: int
    block: int
    warps: int = 8
    stages: int = 3


def config(keys: int, programs: int, wide: bool, dim: int, processors: int) -> Config:
    """For ``keys`` keys of capacity in all rows, each read by ``programs`` programs: about four programs for each
    multiprocessor, but never so few keys that a program's start costs more than its work. ``wide``: products of fp32.

    Blocks are the largest whose kernels need at most 128 registers, as compiled for sm_80 and sm_90.
    """
    chunk = triton.next_power_of_2(max(1, keys * programs // (4 * processors)))
    block = (32 if wide else 64) // (2 if dim > 128 else 1)
    return Config(min(1024, max(128, chunk)), block, stages=2 if wide and dim > 128 else 3)


def numerics(*types: torch.dtype) -> tuple[tl.dtype, str]:
    """The operands of matrix products, which always sum in fp32: the one 16-bit type of all tensors, or fp32
    without TF32. The interpreter multiplies bf16's bit patterns, so there it is widened."""
    kind = types[0] if len(set(types)) == 1 else torch.float32
    if kind == torch.bfloat16 and triton.knobs.runtime.interpret:
        kind = torch.float32
    return _TL[kind], "ieee" if kind == torch.float32 else "tf32"


def probes(precision: str) -> int:
    """Observed queries in one tile of :mod:`kvpass.kernels.triton.probe`."""
    return 16 if precision == "ieee" else 64


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pos: Tensor,
    store_k: Tensor,
    store_v: Tensor,
    log_votes: Tensor,
    row_start: Tensor,
    row_len: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    tail_pos: Tensor,
    tail_at: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None = None,
    chunk: int = 0,
    writes: bool = True,
    *,
    plan: Config | None = None,
) -> Tensor:
    """Same meaning, shapes and dtypes as :func:`kvpass.kernels.reference.attend`. Never waits for the device, and
    what it launches depends on shapes alone, so that it can be captured in a CUDA graph."""
    batch, heads, tokens, key_dim = q.shape
    _, kv_heads, slots, value_dim = tail_v.shape
    capacity, rows, group = store_k.shape[0], batch * kv_heads, heads // kv_heads
    queries = group * tokens
    out = q.new_empty(batch, tokens, heads, value_dim)
    if out.numel() == 0:
        return out.transpose(1, 2)
    row_start, row_len = row_start.contiguous(), row_len.contiguous()
    passes = triton.cdiv(queries, MAX_QUERIES)
    kind, precision = numerics(q.dtype, store_k.dtype, tail_k.dtype)
    if plan is None:
        dim = max(key_dim, value_dim)
        plan = config(capacity + rows * slots, passes, precision == "ieee", dim, _processors(q.device))
    store_tiles = capacity // plan.chunk + rows if capacity else 0
    tail_tiles = triton.cdiv(slots, plan.chunk)
    tiles = store_tiles + rows * tail_tiles
    part_ml = torch.empty(tiles, queries, 2, dtype=torch.float32, device=q.device)
    part_o = torch.empty(tiles, queries, value_dim, dtype=torch.float32, device=q.device)
    reach = (window or UNBOUNDED, chunk or UNBOUNDED)
    tail = (*tail_k.stride()[:3], *tail_v.stride()[:3])
    logits = ((2 * scale / softcap if softcap else scale) * LOG2E, softcap)
    blocks = {
        "GROUP": group,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_K": max(16, triton.next_power_of_2(key_dim)),
        "BLOCK_V": max(16, triton.next_power_of_2(value_dim)),
        "SOFTCAP": softcap > 0,
    }
    block_r = triton.next_power_of_2(rows)
    products = {
        "BLOCK_M": MAX_QUERIES,
        "BLOCK_N": plan.block,
        "TYPE": kind,
        "PRECISION": precision,
        "num_warps": plan.warps,
        "num_stages": plan.stages,
    }
    with torch.cuda.device_of(q):
        if store_tiles:
            store_softmax[store_tiles, passes](
                q, q_pos, store_k, store_v, log_votes, row_start, row_len, part_ml, part_o,
                rows, kv_heads, capacity, tokens, plan.chunk, *q.stride()[:3], q_pos.stride(0),
                store_k.stride(0), store_v.stride(0), *logits, **blocks, **products, BLOCK_R=block_r,
            )  # fmt: skip
        if tail_tiles:
            tail_softmax[rows * tail_tiles, passes](
                q, q_pos, tail_k, tail_v, tail_pos, part_ml, part_o,
                kv_heads, slots, tokens, plan.chunk, *reach, *q.stride()[:3], q_pos.stride(0), tail_pos.stride(0),
                *tail, store_tiles, tail_tiles, *logits, **blocks, **products,
            )  # fmt: skip
        merge_and_append[rows, queries](
            part_ml, part_o, out, q if sinks is None else sinks, q, q_pos, row_len, k, v, tail_k, tail_v, tail_at,
            rows, kv_heads, capacity, slots, tokens, plan.chunk, *reach, *q.stride()[:3],
            *k.stride()[:3], *v.stride()[:3], *tail, q_pos.stride(0), store_tiles, tail_tiles, *logits,
            **blocks, BLOCK_R=block_r, BLOCK_T=PARTIALS, HAS_SINKS=sinks is not None, WRITES=writes and slots > 0,
        )  # fmt: skip
    return out.transpose(1, 2)


def attention_mass(
    k: Tensor,  # [B, Hkv, N, D]
    log_votes: Tensor,  # [B, Hkv, N] fp32; -inf = unused
    pos: Tensor,  # [B, Hkv, N] int32
    q: Tensor,  # [B, Hq, W, D]
    q_pos: Tensor,  # [B, W] int32, -1 = unused
    scale: float,
    causal: bool,
    *,
    chunk: int | None = None,
) -> Tensor:
    """[B, Hkv, G, N] fp32: softmax weight each entry receives from each head of its group, summed over queries."""
    batch, kv_heads, slots, dim = k.shape
    _, heads, width, _ = q.shape
    group, pairs = heads // kv_heads, batch * heads
    log_votes, pos, q_pos = log_votes.contiguous(), pos.contiguous(), q_pos.contiguous()
    kind, precision = numerics(k.dtype, q.dtype)
    wide = precision == "ieee"
    queries = probes(precision)
    passes = triton.cdiv(width, queries)
    plan = config(slots * pairs, passes, wide, dim, _processors(k.device))
    chunk = chunk or plan.chunk
    parts = triton.cdiv(slots, chunk)
    lse = torch.empty(parts, pairs, width, dtype=torch.float32, device=k.device)
    out = torch.empty(batch, kv_heads, group, slots, dtype=torch.float32, device=k.device)
    tensors = (k, log_votes, pos, q_pos)
    strides = (*q.stride()[:3], *k.stride()[:3], *log_votes.stride()[:2], *pos.stride()[:2], q_pos.stride(0))
    options = {
        "GROUP": group,
        "DIM": dim,
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "BLOCK_W": queries,
        "BLOCK_N": plan.block,
        "CAUSAL": causal,
        "TYPE": kind,
        "PRECISION": precision,
        "num_warps": plan.warps,
        "num_stages": plan.stages,
    }
    with torch.cuda.device_of(k):
        probe_lse[passes, pairs, parts](
            q, *tensors, lse, kv_heads, width, slots, chunk, *strides, scale * LOG2E, **options
        )  # fmt: skip
        total = torch.logsumexp(lse * (1 / LOG2E), 0) * LOG2E if parts > 1 else lse[0]
        column_sums[triton.cdiv(slots, options["BLOCK_N"]), pairs](
            q, *tensors, total, out, kv_heads, width, slots, *strides, scale * LOG2E, **options
        )  # fmt: skip
    return out
