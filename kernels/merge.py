"""Merging dropped entries into retained ones so that attention keeps their mass (KeepKV, arXiv 2504.09936).

For a query with logits l_i = scale * q . k_i and votes p_i = exp(m_i), write W = sum p_i exp(l_i), P = sum
p_i, pi_i = p_i exp(l_i) / W, rho_i = p_i / P over the members of one group. The paper's ZIP merge (Eq. 7,
several members: Eq. 25) stores the key lam * sum pi_i k_i with lam = ln(W/P) / sum pi_i l_i, the value sum
pi_i v_i and the vote P; it is lossless for that query (Theorem 3). Because ln(W/P) - sum pi_i l_i = -KL(pi
|| rho), the same mass is reached with *any* key k_r by storing the log-vote m_r = ln W - scale * q . k_r:
bounded where lam flips sign or explodes, the same in whatever order members arrive, and unchanged when a
common vector is added to all keys.

Queries of several positions and heads share one key, value and log-vote. With A the softmax mass of the
group under a query and exact masses, the value error is sum A^2 |v - vbar|^2, so the best shared weights are
pi*_i = sum A^2 pi_i / sum A^2, and the log-vote with the least squared mass error is
exp(m) = sum w A / sum w^2 with w the mass of the merged key at m = 0. One query reduces both to the
lossless merge.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor

from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.group import Groups, segment_logsumexp, segment_sum
from kvpass.kernels.matching import spectral_norm
from kvpass.kernels.min_norm import min_norm_keys
from kvpass.kernels.score import Block, attention_blocks, exp_, grouped_queries, working_dtype

KeyMode = Literal["fixed", "convex", "zip", "zip_strict", "min_norm"]
KEY_MODES: tuple[str, ...] = get_args(KeyMode)
KeyFrame = Literal["cached", "unrotated"]
KEY_FRAMES: tuple[str, ...] = get_args(KeyFrame)
ASKING = ("zip", "zip_strict", "min_norm")  # whose key depends on the logits of queries
LAM = (0.8, 1.25)  # range in which the published key scale is left alone
FAINT = 1e-28  # a sum of A^2 below this has lost weights to underflow in fp32


def merge(
    entries: Entries,
    seen: Observation,
    kept: Tensor,
    kept_used: Tensor,
    groups: Groups,
    *,
    key_mode: KeyMode = "convex",
    key_frame: KeyFrame = "cached",
    causal: bool = True,
    excess: float = float("inf"),
    value_fit: bool = False,
    ridge: float = 1e-3,
    open_kept: Tensor | None = None,
    blocks: Iterable[Block] | None = None,
    log_share: Tensor | None = None,
) -> Entries:
    """The retained entries, each standing for its group.

    Entries without members come back bitwise unchanged (unless ``value_fit`` refits their value).

    Args:
        entries: all entries [B, Hkv, N]; they may carry log-votes and stand for several tokens.
        seen: the queries that weigh the members. Without a usable query members weigh by their votes.
        kept, kept_used: [B, Hkv, M] retained entries as indices into N.
        groups: from :func:`kvpass.kernels.group.group_by_similarity`.
        key_mode: ``fixed`` keeps the target's key, ``convex`` takes the weighted mean, ``zip`` scales the
            mean by the paper's lam limited to [0.8, 1.25] and leaves the remainder to the log-vote,
            ``zip_strict`` is the paper's Eq. 25 with log-vote ln P (a group whose scale is not finite keeps
            the mean), ``min_norm`` moves the mean just so far that several heads' masses are met at once (see
            :func:`kvpass.kernels.min_norm.min_norm_keys`).
        key_frame: ``cached`` averages keys as they are stored, ``unrotated`` as if all members stood at the
            target's position. The log-vote answers for the key that is stored either way.
        causal: a query sees entries up to its own position only.
        excess: the log-vote is held in [0, ln(tokens) + excess]; infinite leaves it alone, which a single
            query needs to be lossless for every key. ``zip_strict`` is never limited.
        value_fit: refit the values of entries marked in ``open_kept`` (see :func:`fit_values`).
        ridge: its regularisation, relative to the squared spectral norm.
        blocks: the attention of ``seen`` over ``entries`` where it is already there.
        log_share: [B, Hkv, N] logs of what members weigh in the mean key and value, in place of A^2 pi; the
            log-vote and the fit remain the queries'.

    Raises:
        ValueError: an unknown mode or frame, or ``unrotated`` where keys turn and how they do is not known.
    """
    if key_mode not in KEY_MODES:
        raise ValueError(f"key_mode must be one of {', '.join(KEY_MODES)}, got {key_mode!r}")
    if key_frame not in KEY_FRAMES:
        raise ValueError(f"key_frame must be one of {', '.join(KEY_FRAMES)}, got {key_frame!r}")
    if key_frame == "unrotated" and seen.turns and seen.frame is None:
        raise ValueError("key_frame='unrotated' needs to know how the keys of the layer turn with their position")
    out = entries.take(kept, kept_used)
    batch, heads, most, dim = out.k.shape
    rows, slots = batch * heads, entries.k.shape[2]
    dtype = working_dtype(entries.k)
    q, q_pos = grouped_queries(seen, heads, dtype)
    member, target = groups.member, groups.target
    if not member.numel() and not value_fit:
        return out

    # Softmax mass A of every group under every query, and sum A^2 pi of every member.
    weight = q.new_zeros(member.shape)
    mass = q.new_zeros(rows, most, q.shape[1])
    log_z = q.new_full((rows, q.shape[1]), torch.inf)
    full = q.new_zeros(rows, q.shape[1], entries.v.shape[-1]) if value_fit else None
    v = entries.v.to(dtype).reshape(rows, slots, -1)
    for block in attention_blocks(entries, seen, causal=causal) if blocks is None else blocks:
        log_z[:, block.at] = block.log_z
        if full is not None:
            full[:, block.at] = (block.mass.transpose(1, 2) @ v) / block.total.unsqueeze(-1)
        if not member.numel():
            continue
        own = block.mass.reshape(rows * slots, -1).index_select(0, member)
        scale = block.total.reciprocal().unsqueeze(1)
        group = segment_sum(own, target, rows * most).reshape(rows, most, -1) * scale
        mass[:, :, block.at] = group
        group = (group * scale).reshape(rows * most, -1)
        weight += own.mul_(group.index_select(0, target)).sum(1)
    offset = q.new_zeros(rows * most)  # the masses of a group are exp(offset) times what is stored

    k = out.k.to(dtype).reshape(rows, most, dim)
    value = out.v.to(dtype).reshape(rows, most, -1)
    log_votes = out.log_votes.to(dtype).reshape(rows, most)
    tokens = out.tokens
    if member.numel():
        merged = groups.merged.reshape(rows, most)
        members_votes = entries.log_votes.to(dtype).reshape(-1).index_select(0, member)
        log_p = segment_logsumexp(members_votes, target, rows * most)
        total = segment_sum(weight, target, rows * most)
        faint = (total < FAINT).index_select(0, target)
        if faint.any():
            group, offset[group], mass.view(rows * most, -1)[group], weight[faint] = _faint(
                entries, q, q_pos, log_z, member[faint], target[faint], causal=causal
            )
            total = segment_sum(weight, target, rows * most)
        by_votes = (members_votes - log_p.index_select(0, target)).exp()
        share = total.index_select(0, target)
        weight = torch.where(share > 0, weight / share, by_votes).unsqueeze(1)
        if log_share is not None:
            own = log_share.to(dtype).reshape(-1).index_select(0, member)
            share = segment_logsumexp(own, target, rows * most).index_select(0, target)
            weight = torch.where(share.isfinite(), (own - share).exp(), by_votes).unsqueeze(1)
        tokens = segment_sum(entries.tokens.reshape(-1).index_select(0, member), target, rows * most)
        tokens = torch.where(groups.merged, tokens.reshape(batch, heads, most).to(out.tokens.dtype), out.tokens)

        own_key = entries.k.reshape(-1, dim).index_select(0, member).to(dtype)
        if key_frame == "unrotated" and seen.frame is not None:
            there = out.pos.reshape(-1).index_select(0, target)
            own_key = seen.frame.turn(own_key, there - entries.pos.reshape(-1).index_select(0, member))
        mean = segment_sum(_movers(weight, groups, rows * most) * own_key, target, rows * most)
        mean = mean.reshape(rows, most, dim)
        if key_mode != "fixed":
            scaled = mean
            log_mass = mass.log() + offset.reshape(rows, most, 1) if key_mode in ASKING else None
            if key_mode == "min_norm":
                share = torch.softmax(2 * log_mass, -1).nan_to_num(0.0)
                scaled = min_norm_keys(mean, q, log_mass + log_z.unsqueeze(1), share, merged)
            elif key_mode in ASKING:
                lam = _zip_scale(mean, q, log_mass, log_z, log_p.reshape(rows, most))
                if key_mode == "zip":
                    lam = lam.clamp(*LAM)
                scaled = mean * torch.where(lam.isfinite(), lam, 1).unsqueeze(-1)
            # The log-vote below must answer for the key that decoding will read, so round it to storage
            # first.
            k = torch.where(merged.unsqueeze(-1), scaled.to(entries.k.dtype).to(dtype), k)
        average = segment_sum(weight * v.reshape(rows * slots, -1).index_select(0, member), target, rows * most)
        value = torch.where(merged.unsqueeze(-1), average.reshape(rows, most, -1), value)

    logits = torch.bmm(k, q.transpose(1, 2)) if member.numel() or value_fit else None
    if causal:
        logits.masked_fill_(out.pos.reshape(rows, most, 1) > q_pos[:, None], -torch.inf)
    if member.numel():
        if key_mode == "zip_strict":
            vote = log_p.reshape(rows, most)
        else:
            unit = logits - log_z.unsqueeze(1)  # mass of the merged key at log-vote 0, relative to its peak
            peak = unit.amax(-1, keepdim=True)
            unit = exp_(unit.sub_(peak.masked_fill(peak.isneginf(), 0)))
            vote = torch.linalg.vecdot(unit, mass).log() - torch.linalg.vecdot(unit, unit).log()
            vote += offset.reshape(rows, most) - peak.squeeze(-1)
            vote = torch.where(vote.isfinite(), vote, log_p.reshape(rows, most))
            if excess != float("inf"):
                most_votes = tokens.reshape(rows, most).to(dtype).log() + excess
                vote = torch.minimum(vote.clamp(min=0), most_votes)
        log_votes = torch.where(merged, vote, log_votes)

    if value_fit:
        short = entries.lengths.reshape(rows, 1) > out.lengths.reshape(rows, 1)
        free = short & kept_used.reshape(rows, most)
        if open_kept is not None:
            free &= open_kept.reshape(rows, most)
        logits += log_votes.unsqueeze(-1)
        value = fit_values(logits, log_z.isfinite(), value, full, free, ridge=ridge)
    return Entries(
        k=k.reshape(batch, heads, most, dim).to(entries.k.dtype),
        v=value.reshape(batch, heads, most, -1).to(entries.v.dtype),
        log_votes=log_votes.reshape(batch, heads, most).to(entries.log_votes.dtype),
        tokens=tokens,
        pos=out.pos,
    )


def fit_values(logits: Tensor, counts: Tensor, value: Tensor, full: Tensor, free: Tensor, *, ridge: float) -> Tensor:
    """Move values so that compressed attention returns the full output, staying near where they are.

    V' = V + (X^T X + lam I)^-1 X^T (Y - X V) with X the softmax of the compressed logits and Y the full
    output: the value fit of Attention Matching (arXiv 2602.16284) with the merged values as the point of
    shrinkage.

    Args:
        logits: [rows, M, R] compressed logits with log-votes, -inf for unused entries.
        counts: [rows, R] bool, queries that take part.
        value: [rows, M, Dv]; full: [rows, R, Dv] attention output over all entries.
        free: [rows, M] bool, entries whose value may move.
        ridge: lam over the squared spectral norm of X restricted to free entries.
    """
    peak = logits.amax(1, keepdim=True)
    blind = ~counts.unsqueeze(1) | peak.isneginf()
    x = exp_(logits - peak.masked_fill(blind, torch.inf))
    x /= x.sum(1, keepdim=True).masked_fill(blind, 1)
    residual = full - torch.bmm(x.transpose(1, 2), value)
    residual.masked_fill_(blind.transpose(1, 2), 0)
    x = x * free.unsqueeze(-1)
    # The smaller of the two equivalent systems: entries by entries, or queries by queries.
    gram = torch.bmm(x, x.transpose(1, 2)) if x.shape[1] <= x.shape[2] else torch.bmm(x.transpose(1, 2), x)
    gram.diagonal(dim1=1, dim2=2).add_((ridge * spectral_norm(gram)).clamp(min=1e-12))
    factor = torch.linalg.cholesky(gram)
    if x.shape[1] <= x.shape[2]:
        step = torch.cholesky_solve(torch.bmm(x, residual), factor)
    else:
        step = torch.bmm(x, torch.cholesky_solve(residual, factor))
    return torch.where(free.unsqueeze(-1), value + step, value)


def _faint(
    entries: Entries,
    q: Tensor,
    q_pos: Tensor,
    log_z: Tensor,
    member: Tensor,
    target: Tensor,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Groups that the softmax over all entries rounds to nothing, in logs relative to their own peak.

    Returns the groups' indices [F], the log [F] of their heaviest member's mass, their masses [F, R] relative
    to it, and their members' weights up to a factor per group.
    """
    slots, dim = entries.k.shape[2:]
    parts = []
    row, count = (member // slots).unique_consecutive(return_counts=True)
    for one, index in zip(row.tolist(), member.split(count.tolist()), strict=True):
        k = entries.k.reshape(-1, dim).index_select(0, index).to(q.dtype)
        own = k @ q[one].T + entries.log_votes.reshape(-1, 1).index_select(0, index) - log_z[one]
        if causal:
            own.masked_fill_(entries.pos.reshape(-1, 1).index_select(0, index) > q_pos[one], -torch.inf)
        parts.append(own)
    own = torch.cat(parts)
    group, target = target.unique_consecutive(return_inverse=True)
    peak = own.new_full((len(group),), -torch.inf).scatter_reduce(0, target, own.amax(1), "amax")
    peak = peak.masked_fill(peak.isneginf(), 0)
    own = own.sub_(peak.index_select(0, target).unsqueeze(1)).exp_()
    mass = segment_sum(own, target, len(group))
    return group, peak, mass, own.mul_(mass.index_select(0, target)).sum(1)


def _movers(weight: Tensor, groups: Groups, count: int) -> Tensor:
    """[T, 1] weights of the members in the mean key: of those that move it, again summing to 1 in each group."""
    if groups.moves is None:
        return weight
    kept = weight * groups.moves.unsqueeze(1)
    total = segment_sum(kept, groups.target, count).index_select(0, groups.target)
    # A target among whose movers nothing has weight keeps its own key.
    return torch.where(total > 0, kept / total, groups.own.to(weight.dtype).unsqueeze(1))


def _zip_scale(mean: Tensor, q: Tensor, log_mass: Tensor, log_z: Tensor, log_p: Tensor) -> Tensor:
    """lam of Eq. 25, [rows, M]; several queries average ln(W/P) and the mean key's logit with weights A^2."""
    share = torch.softmax(2 * log_mass, -1).nan_to_num(0.0)
    seen = share > 0
    tau = (share * torch.where(seen, log_mass + log_z.unsqueeze(1) - log_p.unsqueeze(-1), 0)).sum(-1)
    lbar = (share * torch.bmm(mean, q.transpose(1, 2))).sum(-1)
    return tau / lbar
