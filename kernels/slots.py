"""Cuts a context into slots where its hidden states turn (GraceKV, arXiv 2608.07001, Eq. 4-5 and appendix B).

Slots are shared by all layers and KV heads; they are the roots of the prototype trees.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SCALES = (4, 8, 16)  # tokens on either side over which a direction is taken
STABILITY = 0.25  # lam_stab: curvature that not all layers and scales see counts less
DIRECTIONS = 64  # wider hidden states are projected to so many dimensions, which keeps angles
SMALL = 1e-6


def unit(hidden: Tensor) -> Tensor:
    """[L, N, <= DIRECTIONS] fp64: states of length 1, projected at random (same seed always) where they are wide."""
    width = hidden.shape[-1]
    if width > DIRECTIONS:
        draw = torch.randn(width, DIRECTIONS, generator=torch.Generator().manual_seed(0)) / DIRECTIONS**0.5
        hidden = hidden.float() @ draw.to(hidden.device)
    hidden = hidden.double()
    return hidden / hidden.norm(dim=-1, keepdim=True).clamp(min=SMALL)


def curvature(states: Tensor) -> Tensor:
    """[N] fp64: 1 - cosine between the ways into and out of each token; mean less ``STABILITY`` std over layers and
    scales. ``states`` [L, N, E] are unit vectors.

    0 within a scale of either end, and where a way has no length (the paper's formula would call that a turn).
    """
    layers, tokens, width = states.shape
    sums = torch.cat([states.new_zeros(layers, 1, width), states.cumsum(1)], 1)
    turns = states.new_zeros(len(SCALES), layers, tokens)
    for index, scale in enumerate(SCALES):
        if tokens < 2 * scale + 1:
            continue
        here = slice(scale, tokens - scale)
        before = (sums[:, scale + 1 : tokens - scale + 1] - sums[:, 1 : tokens - 2 * scale + 1]) / scale
        after = (sums[:, 2 * scale + 1 :] - sums[:, scale + 1 : tokens - scale + 1]) / scale
        into, out = states[:, here] - before, after - states[:, here]
        lengths = into.norm(dim=-1), out.norm(dim=-1)
        cosine = (into * out).sum(-1) / (lengths[0].clamp(min=SMALL) * lengths[1].clamp(min=SMALL))
        still = (lengths[0] < SMALL) | (lengths[1] < SMALL)
        turns[index, :, here] = (1 - cosine).masked_fill(still, 0)
    turns = turns.flatten(0, 1)
    return turns.mean(0) - STABILITY * turns.std(0, correction=0)


def robust(x: Tensor) -> Tensor:
    """Deviations from the median in units of the median absolute deviation."""
    middle = x.quantile(0.5)
    return (x - middle) / (1.4826 * (x - middle).abs().quantile(0.5) + SMALL)


def segment(
    states: Tensor,
    boundary: Tensor,
    *,
    least: int = 16,
    target: int = 64,
    most: int = 128,
    cut: float = 1.0,
    dispersion: float = 0.25,
    length: float = 0.10,
) -> Tensor:
    """[J + 1] int64 edges 0 .. N of the slots with the largest total score, by dynamic programming.

    A slot costs ``dispersion`` times the variance of the steps between its states and ``length`` times its squared
    relative distance from ``target``; a cut before token a is worth ``boundary[a - 1] - cut``. Slots hold ``least`` to
    ``most`` tokens; a context below ``least`` is one slot.

    Args:
        states: [L, N, E] fp64 unit vectors.
        boundary: [N] score of a cut after each token.
    """
    tokens = boundary.shape[0]
    if tokens < 2 * least:
        return torch.tensor([0, tokens])
    sizes = np.arange(most, least - 1, -1)  # so that the first of equal predecessors is the earliest
    value = -dispersion * _spread(states, least, most) - length * ((sizes - target) / target) ** 2
    worth = np.concatenate([[0.0], boundary.cpu().double().numpy()[:-1] - cut])
    best = np.full(tokens + 1 + most, -np.inf)  # shifted by ``most``, whose place is empty
    best[most] = worth[0]
    back = np.zeros(tokens + 1, dtype=np.int64)
    for end in range(least, tokens + 1):
        total = best[end : end + most - least + 1] + value[end]
        choice = int(total.argmax())
        back[end] = end - sizes[choice]
        best[most + end] = total[choice] + (worth[end] if end < tokens else 0.0)
    edges = [tokens]
    while edges[-1] > 0:
        edges.append(int(back[edges[-1]]))
    return torch.tensor(edges[::-1])


def _spread(states: Tensor, least: int, most: int) -> np.ndarray:
    """[N + 1, most - least + 1]: mean over layers of the sample variance of the steps inside the slot of each size
    (``most`` first) that ends before each token."""
    layers, tokens, width = states.shape
    steps = states[:, 1:] - states[:, :-1]
    sums = torch.cat([states.new_zeros(layers, 1, width), steps.cumsum(1)], 1)
    squares = torch.cat([states.new_zeros(layers, 1), steps.square().sum(-1).cumsum(1)], 1)
    result = np.full((tokens + 1, most - least + 1), np.inf)
    for place, size in enumerate(range(most, least - 1, -1)):
        if size > tokens:
            continue
        count = size - 1  # steps inside
        total = (sums[:, count:] - sums[:, : tokens - count]).square().sum(-1)
        own = squares[:, count:] - squares[:, : tokens - count]
        variance = ((own - total / count) / max(count - 1, 1)).clamp(min=0) if count >= 2 else torch.zeros_like(own)
        result[size:, place] = variance.mean(0).cpu().numpy()
    return result
