"""Whether a dropped entry should join the retained one most like it, judged by what queries would lose."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.score import Block, grouped_queries, working_dtype


def logit_spread(entries: Entries, seen: Observation, dropped: Tensor, target: Tensor) -> Tensor:
    """Standard deviation over the observed queries of the logit difference between two entries.

    A merge is lossless for every query under which this difference stays what it is, so it is the quantity that
    cosine similarity stands in for. With C the queries' covariance its square is d^T C d for d the difference of
    keys: no logit is computed.

    Args:
        dropped, target: [B, Hkv, E] int64 into the entries.

    Returns:
        [B, Hkv, E], 0 without queries.
    """
    batch, heads, _, dim = entries.k.shape
    rows = batch * heads
    dtype = working_dtype(entries.k)
    q, q_pos = grouped_queries(seen, heads, dtype)
    counts = (q_pos >= 0).unsqueeze(-1)
    number = counts.sum(1, keepdim=True).clamp(min=1)
    mean = (q * counts).sum(1, keepdim=True) / number
    centred = (q - mean) * counts
    covariance = torch.bmm(centred.transpose(1, 2), centred) / number

    def keys(at: Tensor) -> Tensor:
        return entries.k.gather(2, at.unsqueeze(-1).expand(-1, -1, -1, dim)).to(dtype).reshape(rows, -1, dim)

    apart = keys(dropped) - keys(target)
    return (torch.bmm(apart, covariance) * apart).sum(-1).clamp(min=0).sqrt().reshape(dropped.shape)


def worth_merging(entries: Entries, blocks: Iterable[Block], dropped: Tensor, target: Tensor) -> Tensor:
    """[B, Hkv, E] bool: merging ``dropped`` into ``target`` costs the queries less than losing it.

    With A an entry's softmax weight, pi = A_e / (A_e + A_c) and o the output, a merge with the best shared value
    and exact masses leaves the squared error |v_e - v_c|^2 sum (A_e + A_c)^2 (pi - pi*)^2 over queries, where pi*
    is their mean weighted by (A_e + A_c)^2; losing e leaves sum (A_e |v_e - o| / (1 - A_e))^2.
    """
    batch, heads, slots = entries.tokens.shape
    rows, dtype = batch * heads, working_dtype(entries.k)
    v = entries.v.to(dtype).reshape(rows, slots, -1)
    at_e, at_c = dropped.reshape(rows, -1, 1), target.reshape(rows, -1, 1)
    value = v.gather(1, at_e.expand(-1, -1, v.shape[-1]))
    apart = (value - v.gather(1, at_c.expand(-1, -1, v.shape[-1]))).square().sum(-1)
    length = value.square().sum(-1, keepdim=True)
    both = one = one_squared = lost = value.new_zeros(rows, value.shape[1])
    for block in blocks:
        total = block.total.unsqueeze(1)
        width = (-1, -1, total.shape[-1])
        a_e = block.mass.gather(1, at_e.expand(*width)) / total
        pair = a_e + block.mass.gather(1, at_c.expand(*width)) / total
        output = torch.bmm(block.mass.transpose(1, 2), v) / block.total.unsqueeze(-1)
        away = length - 2 * torch.bmm(value, output.transpose(1, 2)) + output.square().sum(-1).unsqueeze(1)
        tiny = torch.finfo(dtype).eps
        lost = lost + (away.clamp(min=0) * (a_e / (1 - a_e).clamp(min=tiny)).square()).sum(-1)
        both = both + pair.square().sum(-1)
        one = one + (pair * a_e).sum(-1)
        one_squared = one_squared + a_e.square().sum(-1)
    # sum (A_e + A_c)^2 (pi - pi*)^2, expanded.
    varies = (one_squared - one.square() / both.clamp(min=torch.finfo(dtype).tiny)).clamp(min=0)
    return (varies * apart < lost).reshape(dropped.shape)
