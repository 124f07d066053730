"""How far a compressed cache's predictions are from the full cache's, over the same forced tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

RANGE = 0.05  # nats a context must be worth before a share of it means anything


def fidelity(log_p: Tensor, full: Tensor, without: Tensor, gold: Sequence[int]) -> dict[str, float | bool | None]:
    """Scores of ``log_p`` beside ``full`` and ``without`` (the model that never saw the context), all [T, V] log-probs.

    * ``kl``: KL(full || compressed), nats a token. ``agreement``: share of tokens with the full cache's favourite.
    * ``nll``, ``nll_full``, ``nll_without``: of the tokens ``gold`` [T], mean nats. ``delta``: ``nll - nll_full``.
    * ``retention``: ``1 - delta / (nll_without - nll_full)``: 1 = lossless, 0 = as if the context were absent; None
      where the context is worth less than ``RANGE``.
    * ``exact``: the favourite is the answer's token everywhere, so greedy decoding emits it; ``exact_full`` likewise.
    """
    target = torch.tensor(list(gold), device=log_p.device)
    kl = float((full.exp() * (full - log_p)).sum(-1).double().mean())
    nll, nll_full, nll_without = (_nll(scores, target) for scores in (log_p, full, without))
    worth = nll_without - nll_full
    favourite, favourite_full = log_p.argmax(-1), full.argmax(-1)
    return {
        "kl": max(kl, 0.0),  # rounding may leave it a hair below
        "nll": nll,
        "nll_full": nll_full,
        "nll_without": nll_without,
        "delta": nll - nll_full,
        "retention": 1 - (nll - nll_full) / worth if worth >= RANGE else None,
        "agreement": float((favourite == favourite_full).double().mean()),
        "exact": bool((favourite == target).all()),
        "exact_full": bool((favourite_full == target).all()),
    }


def _nll(log_p: Tensor, target: Tensor) -> float:
    return float(-log_p.gather(1, target[:, None]).double().mean())
