"""Who is needed, for whom: direct relevance to the question, then hops (GraceKV, arXiv 2608.07001, Eq. 36-42).

Relevance is a share of probability, so what an interval is worth is the sum over its tokens at every scale.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

SEED_MASS, SEEDS = 0.9, 64  # a hop starts from the tokens with this share of the weight, at most so many
DECAY = 0.5  # rho: weight of a hop relative to the one before
TINY = 1e-12


def shares(weight: Tensor) -> Tensor:
    """``weight`` [..., N] summing to 1; zeros stay zeros."""
    return weight / (weight.sum(-1, keepdim=True) + TINY)


def seeds(weight: Tensor) -> Tensor:
    """Indices into ``weight`` [N] of the tokens that a hop starts from, heaviest first."""
    order = weight.argsort(descending=True, stable=True)
    running = weight[order].cumsum(0) / (weight.sum() + TINY)
    count = min(SEEDS, int((running < SEED_MASS).sum()) + 1)
    order = order[:count]
    return order[weight[order] > 0]


def hops(direct: Tensor, ask: Callable[[Tensor, Tensor], Tensor], count: int) -> Tensor:
    """[N] what is ``count`` hops away: what the tokens with direct relevance attend to, and so on.

    Args:
        direct: [N] relevance over all layers and heads, summing to 1.
        ask: (tokens [U], weights [U]) -> [N], the attention those tokens pay to the context.
    """
    found, seen = torch.zeros_like(direct), torch.zeros_like(direct, dtype=torch.bool)
    at = seeds(direct)
    weights = direct[at]
    for hop in range(count):
        if not at.numel():
            break
        paid = ask(at, weights / (weights.sum() + TINY)).to(direct)
        seen[at] = True
        paid = paid.masked_fill(seen, 0)
        found += DECAY**hop * paid
        at = seeds(paid)
        weights = paid[at]
    return found


def relevance(direct: Tensor, indirect: Tensor, hop_share: float) -> Tensor:
    """[R, N] relevance of each row's tokens: its own share and the hops', which all rows have in common.

    Args:
        direct: [R, N] direct shares.
        indirect: [N] from :func:`hops`.
        hop_share: lam_graph.
    """
    if not bool(indirect.sum() > 0):
        return direct
    return (1 - hop_share) * direct + hop_share * shares(indirect)


def floor_candidates(
    relevance: Tensor,
    held: Tensor,
    *,
    pool: int = 7,
    shared: float = 0.5,
    gate: float = 1.2,
    mass: float = 0.95,
) -> list[Tensor]:
    """Per row the tokens that must stay exact, most needed first (Eq. 46-49).

    A token needs a pooled relevance (``shared`` of it the mean over rows) of ``gate`` times an even share, and comes
    before the row's own relevance adds up to ``mass``.

    Args:
        relevance: [R, N].
        held: [R, N] bool, which of the N a row has.
    """
    mean = relevance.mean(0)
    mixed = ((1 - shared) * relevance + shared * mean).unsqueeze(1)
    pooled = max_pool1d(mixed, pool, stride=1, padding=pool // 2).squeeze(1)
    result = []
    least = gate / held.sum(-1).clamp(min=1)
    for row, own in enumerate(pooled.masked_fill(~held, -torch.inf)):
        order = own.argsort(descending=True, stable=True)
        order = order[own[order] >= least[row]]
        running = relevance[row][order].cumsum(0)
        result.append(order[: int((running < mass).sum())])
    return result
