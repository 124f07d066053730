"""``attend`` on torch's own scaled-dot-product attention: prefill everywhere, and decode without a compiler.

Query heads of a group are packed behind their KV head, so keys and values are read once a group; log-votes enter as
a mask. Queries go in blocks, so no [S, S] tensor exists.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.kernels.layout import append

QUERY_BLOCK = 512


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
) -> Tensor:
    """Same meaning, shapes and dtypes as :func:`kvpass.kernels.reference.attend`."""
    batch, heads, length, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[-1])
    fresh = store_k.shape[0] == 0 and not bool((tail_pos >= 0).any())
    # Without a fused kernel, as for unequal head dimensions, SDPA would build [S, S] scores.
    plain = fresh and not window and not chunk and not softcap and sinks is None and q.shape[-1] == v.shape[-1]
    if plain and bool((q_pos >= 0).all()):
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        out.copy_(result.transpose(1, 2))
    elif plain and _left_padded(q_pos):
        out.zero_()
        for b, pad in enumerate((q_pos < 0).sum(-1).tolist()):
            if pad < length:
                row = slice(b, b + 1)
                result = F.scaled_dot_product_attention(
                    q[row, :, pad:],
                    k[row, :, pad:],
                    v[row, :, pad:],
                    is_causal=True,
                    scale=scale,
                    enable_gqa=True,
                )
                out[row, pad:] = result.transpose(1, 2)
    else:
        _attend_blocks(
            out, q, k, v, q_pos, store_k, store_v, log_votes, row_start, row_len, tail_k, tail_v, tail_pos,
            scale, window, softcap, sinks, chunk,
        )  # fmt: skip
    if writes:
        append(k, v, tail_k, tail_v, tail_at)
    return out.transpose(1, 2)


def _left_padded(q_pos: Tensor) -> bool:
    real = (q_pos >= 0).to(torch.int8)
    return bool((real.diff(dim=-1) >= 0).all())


def _attend_blocks(
    out, q, k, v, q_pos, store_k, store_v, log_votes, row_start, row_len, tail_k, tail_v, tail_pos,
    scale, window, softcap, sinks, chunk,
):  # fmt: skip
    batch, heads, length, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    rows_k, rows_v, votes = _padded_store(store_k, store_v, log_votes, row_start, row_len)
    stored = votes.shape[-1]
    keys = torch.cat([rows_k.to(q.dtype), tail_k.to(q.dtype), k], 2)
    values = torch.cat([rows_v.to(q.dtype), tail_v.to(q.dtype), v], 2)
    exact_pos = torch.cat([tail_pos, q_pos], -1)  # [B, T + S]
    unused = (exact_pos < 0)[:, None, :, None]  # such a slot may hold anything, and 0 * nan is nan
    keys[:, :, stored:].masked_fill_(unused, 0.0)
    values[:, :, stored:].masked_fill_(unused, 0.0)
    for start in range(0, length, QUERY_BLOCK):
        block = slice(start, min(start + QUERY_BLOCK, length))
        positions = q_pos[:, block, None]
        seen = (exact_pos[:, None] >= 0) & (exact_pos[:, None] <= positions)
        if window:
            seen &= exact_pos[:, None] > positions - window
        if chunk:
            seen &= exact_pos[:, None] // chunk == positions // chunk
        first, last = _span(seen)  # keys outside are seen by no query of the block
        bias = torch.zeros(batch, kv_heads, seen.shape[1], stored + last - first, device=q.device)
        bias[..., :stored] = votes.unsqueeze(2)
        bias[..., stored:].masked_fill_(~seen[:, None, :, first:last], -torch.inf)
        chosen_k, chosen_v = keys, values
        if first > 0 or stored + last < keys.shape[2]:
            chosen_k = torch.cat([keys[:, :, :stored], keys[:, :, stored + first : stored + last]], 2)
            chosen_v = torch.cat([values[:, :, :stored], values[:, :, stored + first : stored + last]], 2)
        queries = q[:, :, block].reshape(batch, kv_heads, -1, q.shape[-1])  # group and token in one dimension
        bias = bias.repeat(1, 1, group, 1)
        if softcap or sinks is not None:
            result = _spelled_out(queries, chosen_k, chosen_v, bias, scale, softcap, sinks, group)
        else:
            # On CPU the mask may stay fp32 beside halves, which a log-vote needs: bf16 loses up to 1.6 % of a vote.
            mask = bias if q.device.type == "cpu" and q.dtype != torch.float64 else bias.to(q.dtype)
            result = F.scaled_dot_product_attention(queries, chosen_k, chosen_v, attn_mask=mask, scale=scale)
        blind = (bias == -torch.inf).all(-1, keepdim=True) | (positions < 0).repeat(1, group, 1).unsqueeze(1)
        result = result.masked_fill(blind, 0.0).view(batch, heads, -1, v.shape[-1])
        out[:, block] = result.transpose(1, 2)


def _spelled_out(q, k, v, bias, scale, softcap, sinks, group):
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + bias
    if sinks is not None:
        extra = sinks.to(wide).view(k.shape[1], group, 1).expand(-1, -1, q.shape[2] // group)
        logits = torch.cat([logits, extra.reshape(1, k.shape[1], -1, 1).expand(q.shape[0], -1, -1, -1)], -1)
    return (logits.softmax(-1)[..., : k.shape[2]] @ v.to(wide)).to(q.dtype)


def _padded_store(store_k, store_v, log_votes, row_start, row_len):
    """Rows [B, Hkv, n, D] of the longest row's length n; shorter rows end in entries with log-vote -inf."""
    longest = int(row_len.max()) if row_len.numel() else 0
    step = torch.arange(longest, device=store_k.device)
    used = step < row_len.unsqueeze(-1)
    index = torch.where(used, row_start.unsqueeze(-1) + step, 0)
    return store_k[index], store_v[index], log_votes[index].masked_fill(~used, -torch.inf)


def _span(seen: Tensor) -> tuple[int, int]:
    hit = seen.flatten(0, 1).any(0).nonzero().flatten()
    return (int(hit[0]), int(hit[-1]) + 1) if len(hit) else (0, 0)
