"""The merged key that has the right mass under several query heads at once, as near the mean key as possible."""

from __future__ import annotations

import torch
from torch import Tensor

LEAP = 0.25  # the change of key, over its length, above which the mean key is kept
RIDGE = 1e-8  # over the mean curvature: keeps the system solvable where queries do not span the head dimension


def min_norm_keys(mean: Tensor, q: Tensor, log_w: Tensor, share: Tensor, merged: Tensor) -> Tensor:
    """Mean keys moved by the smallest dk with ``q_r . (mean + dk) + m = log_w_r`` for one log-vote m.

    With no more queries than dimensions every query's mass is met; with more, the squared error of log-masses
    weighted by ``share`` is least. Nearly parallel queries that ask for different masses would move the key far:
    where |dk| exceeds ``LEAP`` of the mean key's length it stays as it is, and the log-vote alone has to answer.

    Args:
        mean: [rows, M, D]; q: [rows, R, D] with the logit scale.
        log_w: [rows, M, R] log of the group's mass; it counts where ``share`` [rows, M, R] is positive, whose sum
            over queries is 1.
        merged: [rows, M] bool, the keys in question.
    """
    out = mean.clone()
    for row in range(len(mean)):
        at = merged[row].nonzero().flatten()
        if not len(at):
            continue
        key, query, weight = mean[row, at].double(), q[row].double(), share[row, at].double()
        wanted = torch.where(weight > 0, log_w[row, at].double() - key @ query.T, 0)
        wanted -= (weight * wanted).sum(-1, keepdim=True)
        centre = weight @ query
        outer = (query.unsqueeze(2) * query.unsqueeze(1)).flatten(1)
        system = (weight @ outer).reshape(len(at), query.shape[1], query.shape[1])
        system -= centre.unsqueeze(2) * centre.unsqueeze(1)
        pull = (weight * wanted) @ query
        curvature = system.diagonal(dim1=1, dim2=2)
        curvature += (RIDGE * curvature.mean(-1, keepdim=True)).clamp(min=1e-12)
        step = torch.linalg.solve(system, pull.unsqueeze(-1)).squeeze(-1)
        near = step.norm(dim=-1) <= LEAP * key.norm(dim=-1)
        out[row, at] = torch.where(near.unsqueeze(-1), key + step, key).to(mean.dtype)
    return out
