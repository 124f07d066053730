"""Attention over votes, written to be obviously right: one loop over sequences and KV heads, everything in fp32.

An entry with log-vote ``m`` competes in the softmax as ``exp(scale * q.k + m)``: the vote-weighted attention
``sum p s v / sum p s`` of KeepKV (arXiv 2504.09936, Eq. 6) with ``m = ln p``, and GraceKV's multiplicity (arXiv
2608.07001, Eq. 27). Kernels are tested against this file and nothing runs it in production.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.kernels.layout import append


def attend(
    q: Tensor,  # [B, Hq, S, Dk] queries of the new tokens, after rotation
    k: Tensor,  # [B, Hkv, S, Dk] their keys
    v: Tensor,  # [B, Hkv, S, Dv] their values
    q_pos: Tensor,  # [B, S] int32 logical positions; -1 = padding
    store_k: Tensor,  # [N, Dk] packed rows
    store_v: Tensor,  # [N, Dv]
    log_votes: Tensor,  # [N] fp32
    row_start: Tensor,  # [B, Hkv] int64
    row_len: Tensor,  # [B, Hkv] int32
    tail_k: Tensor,  # [B, Hkv, T, Dk] exact tokens since the last compression; the new ones are written here
    tail_v: Tensor,  # [B, Hkv, T, Dv]
    tail_pos: Tensor,  # [B, T] int32 position of each slot before this call; -1 = unused
    tail_at: Tensor,  # [1] int64 slot of the first new token; slots wrap (a ring)
    scale: float,
    window: int,  # 0 = every earlier position is visible, W = the last W positions including the query's own
    softcap: float,  # 0 = none
    sinks: Tensor | None = None,  # [Hq] one more logit per head, in the denominator only
    chunk: int = 0,  # C = only positions of the query's own chunk [n * C, n * C + C) are visible, 0 = all
    writes: bool = True,  # False = another attention over the same cache appends the new tokens
) -> Tensor:
    """[B, Hq, S, Dv] in q's dtype, a view of [B, S, Hq, Dv] memory. Padding queries give zeros."""
    batch, heads, length, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(batch, length, heads, v.shape[-1])
    for b in range(batch):
        exact_pos = torch.cat([tail_pos[b], q_pos[b]]).long()
        query = q_pos[b].long()[:, None]
        seen = (exact_pos >= 0) & (exact_pos <= query)
        if window:
            seen &= exact_pos > query - window
        if chunk:
            seen &= exact_pos // chunk == query // chunk
        for h in range(kv_heads):
            row = slice(int(row_start[b, h]), int(row_start[b, h]) + int(row_len[b, h]))
            keys = torch.cat([store_k[row].to(wide), tail_k[b, h].to(wide), k[b, h].to(wide)])
            values = torch.cat([store_v[row].to(wide), tail_v[b, h].to(wide), v[b, h].to(wide)])
            votes = torch.cat([log_votes[row].to(wide), keys.new_zeros(len(exact_pos))])
            visible = torch.cat([seen.new_ones(length, int(row_len[b, h])), seen], -1)
            values = torch.where(visible.any(0)[:, None], values, 0)
            for g in range(h * group, (h + 1) * group):
                logits = scale * (q[b, g].to(wide) @ keys.T)
                if softcap:
                    logits = softcap * torch.tanh(logits / softcap)
                logits = (logits + votes).masked_fill(~visible, -torch.inf)
                if sinks is not None:
                    logits = torch.cat([logits, sinks[g].to(wide).expand(length, 1)], -1)
                weights = logits.softmax(-1).nan_to_num(0.0)[:, : len(values)]
                out[b, :, g] = torch.where(query >= 0, weights @ values, 0).to(out.dtype)
    if writes:
        append(k, v, tail_k, tail_v, tail_at)
    return out.transpose(1, 2)
