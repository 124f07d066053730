"""Attention that entries will receive, predicted from what they have received (KeepKV, arXiv 2504.09936, Eq. 8).

After the step at position t an entry's softmax mass A, log-vote included and averaged over its group's heads, is
predicted by S / c with S = sum (1-a) a^(t-k) A_k and c = sum (1-a) a^(t-k) over the observed steps k that could see it.
The paper divides by 1 - a^t whatever was summed, so constant attention does not predict itself there. Masses of merged
entries add up. Kept in logs, as (ln S, ln c), and the same whether steps come one by one or many at a time.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from kvpass.kernels.entries import Entries, Observation, Predicted
from kvpass.kernels.group import Groups, segment_logsumexp
from kvpass.kernels.score import BLOCK


def unseen(entries: Entries) -> Tensor:
    """[B, Hkv, N, 2]: the state of entries that no step has seen."""
    return torch.full((*entries.pos.shape, 2), -torch.inf, device=entries.pos.device)


def predict(entries: Entries, seen: Observation, alpha: float) -> Predicted:
    """``entries`` after the steps of ``seen`` that came after those they have seen already.

    A step weighs ``1 - alpha`` when it is the last, and ``alpha`` as much with every later position. It sees entries
    up to its own position.

    Args:
        entries: [B, Hkv, N]; without a state of earlier steps where they are not :class:`Predicted`.
        seen: queries [B, Hq, W, Dk] in any order; those at -1 do not count.
    """
    batch, heads, slots, dim = entries.k.shape
    group = seen.q.shape[1] // heads
    ema = entries.ema if isinstance(entries, Predicted) else unseen(entries)
    before = entries.pos.masked_fill(ema[..., 1].isneginf(), -1).flatten(1).amax(-1, keepdim=True)  # [B, 1]
    counts = seen.q_pos > before
    now = torch.where(counts, seen.q_pos, before).amax(-1, keepdim=True)
    decay = math.log(alpha)
    state = ema + decay * (now - before)[..., None, None]
    weight = math.log1p(-alpha) + decay * (now - seen.q_pos)  # [B, W]
    k = entries.k.float().reshape(batch * heads, slots, dim)
    votes, pos = entries.log_votes.float().unsqueeze(2), entries.pos.unsqueeze(2)
    block = max(1, BLOCK // max(1, batch * heads * slots * group))
    # Only columns that count for some sequence.
    columns = counts.any(0).nonzero().flatten()
    for at in columns.split(block):
        # [B, Hkv, n, G, N]: softmax runs over what is contiguous.
        q = seen.q[:, :, at].float().reshape(batch * heads, group, len(at), dim).transpose(1, 2)
        logits = torch.bmm(q.reshape(batch * heads, -1, dim), k.transpose(1, 2)).mul_(seen.scale)
        logits = logits.reshape(batch, heads, len(at), group, slots) + votes.unsqueeze(3)
        visible = (pos <= seen.q_pos[:, None, at, None]) & counts[:, None, at, None] & entries.valid.unsqueeze(2)
        logits.masked_fill_(~visible.unsqueeze(3), -torch.inf)
        own = logits.log_softmax(-1).nan_to_num(nan=-torch.inf).logsumexp(3) - math.log(group)
        factor = weight[:, None, at, None]
        parts = torch.stack([own, torch.zeros_like(own)], -1) + factor.unsqueeze(-1)
        parts.masked_fill_(~visible.unsqueeze(-1), -torch.inf)
        state = torch.logaddexp(state, parts.logsumexp(2))
    plain = entries.plain if isinstance(entries, Predicted) else entries
    return Predicted(**vars(plain), ema=state)


def log_mass(entries: Predicted) -> Tensor:
    """[B, Hkv, N] fp32: log of the predicted softmax mass; -inf where no step has seen the entry."""
    total, weight = entries.ema.unbind(-1)
    return (total - weight).masked_fill(weight.isneginf(), -torch.inf)


def merged(entries: Predicted, out: Entries, kept: Tensor, groups: Groups) -> Predicted:
    """``out`` [B, Hkv, M], made of ``entries`` by ``groups``, with its predictions: masses of members add up.

    A merged entry goes on with the weight of the target, whose place it takes.
    """
    weight = entries.ema[..., 1].gather(2, kept)
    mass = log_mass(entries)
    own = mass.gather(2, kept)
    if groups.member.numel():
        count = own.numel()
        summed = segment_logsumexp(mass.reshape(-1).index_select(0, groups.member), groups.target, count)
        own = torch.where(groups.merged, summed.reshape(own.shape), own)
    return Predicted(**vars(out), ema=torch.stack([own + weight, weight], -1))


def since(seen: Observation, window: int) -> Observation:
    """Only the queries of the last ``window`` positions count; the shape stays."""
    last = seen.q_pos.amax(-1, keepdim=True)
    return replace(seen, q_pos=seen.q_pos.masked_fill(seen.q_pos <= last - window, -1))
