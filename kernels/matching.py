"""Choosing keys and votes so that a few entries keep the softmax denominator of all (Attention Matching, arXiv
2602.16284)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def fit_votes(
    mass: Tensor,
    target: Tensor,
    *,
    low: float,
    high: float,
    steps: int = 2,
    ridge: float = 1e-6,
    gram: Tensor | None = None,
) -> Tensor:
    """Weights w of keys with the least squared error of the denominator, ``exp(low) <= w <= exp(high)``.

    The least-squares solution is clamped, then improved by projected-gradient steps, as published. It is shrunk
    towards 1, the vote of an original entry, rather than to the minimum norm: fewer queries than keys leave it
    undetermined.

    Args:
        mass: [rows, T, R] exp(logit - the query's largest logit); 0 for a key or query that does not take part.
        target: [rows, R] what the weighted masses should sum to.
        ridge: shrinkage over the squared spectral norm of ``mass``.
        gram: [rows, T, T] fp64 products of the masses, where they are there already.

    Returns:
        [rows, T], 1 for a key without mass.
    """
    mass, target = mass.double(), target.double()
    gram = torch.bmm(mass, mass.transpose(1, 2)) if gram is None else gram
    norm = spectral_norm(gram).clamp(min=torch.finfo(gram.dtype).tiny)
    # Shifted so that the prior is 0: solve for w - 1.
    pull = torch.bmm(mass, target.unsqueeze(-1)) - gram.sum(-1, keepdim=True)
    system = gram.clone()
    system.diagonal(dim1=1, dim2=2).add_((ridge * norm).clamp(min=1e-30))
    factor = torch.linalg.cholesky(system)
    bounds = (math.exp(low), math.exp(high))
    weight = (1 + torch.cholesky_solve(pull, factor)).clamp(*bounds)
    for _ in range(steps):
        slope = torch.bmm(gram, weight - 1) - pull
        weight = (weight - slope / norm.unsqueeze(-1)).clamp(*bounds)
    return torch.where(gram.diagonal(dim1=1, dim2=2) > 0, weight.squeeze(-1), 1.0)


def pursue(mass: Tensor, target: Tensor, count: int, *, rounds: int, low: float, high: float) -> Tensor:
    """Keys that together explain the denominator best, greedily (orthogonal matching pursuit).

    Each round takes the keys whose masses correlate most with what the chosen ones leave unexplained, then fits
    all votes anew; ``count`` keys are taken in at most ``rounds`` rounds of equal size.

    Args:
        mass: [N, R] as in :func:`fit_votes`, one row's candidates; target: [R].

    Returns:
        [count] int64 indices into N, ascending. The earlier key wins a tie.
    """
    mass, target = mass.double(), target.double()
    chosen = torch.zeros(len(mass), dtype=torch.bool, device=mass.device)
    picked = torch.empty(count, dtype=torch.int64, device=mass.device)
    own = mass.new_empty(count, mass.shape[1])
    gram = mass.new_empty(count, count)  # grows with the chosen: anew in each round it would be most of the work
    left, done = target, 0
    while done < count:
        gain = (mass @ left).masked_fill(chosen, -torch.inf)
        more = gain.argsort(descending=True, stable=True)[: min(count - done, -(-count // rounds))]
        end = done + len(more)
        chosen[more], picked[done:end], own[done:end] = True, more, mass[more]
        gram[done:end, :end] = own[done:end] @ own[:end].T
        gram[:done, done:end] = gram[done:end, :done].T
        done = end
        if done < count:
            found = gram[:done, :done].contiguous()
            weight = fit_votes(own[None, :done], target[None], low=low, high=high, gram=found[None])[0]
            left = target - weight @ own[:done]
    return picked.sort().values


def spectral_norm(gram: Tensor, steps: int = 8) -> Tensor:
    """[rows, 1] largest eigenvalue of ``gram`` [rows, n, n] with entries >= 0, by power iteration: its constant
    start is not orthogonal to the leading vector."""
    direction = gram.new_ones(gram.shape[0], gram.shape[1], 1)
    norm = gram.new_zeros(gram.shape[0], 1, 1)
    for _ in range(steps):
        image = torch.bmm(gram, direction)
        norm = image.norm(dim=1, keepdim=True)
        direction = image / norm.clamp(min=torch.finfo(image.dtype).tiny)
    return norm.squeeze(-1)
