"""Layers of one shape side by side, as if they were sequences of a batch.

While decoding a layer holds so little that calling operators costs more than what they do; thirty layers at once cost
little more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvpass.kernels.entries import Entries, Observation

SMALL = 1 << 16  # entries of all layers together, up to which they are worth stacking

Layer = tuple[Entries, Observation]


def together(layers: Sequence[Layer], *, framed: bool) -> list[range]:
    """Which layers to work on at once: all of them if they are alike and small, else one by one.

    ``framed``: how their keys turn matters, and layers may differ in it.
    """
    kinds = {
        (type(e), e.k.shape, e.v.shape, e.k.dtype, o.q.shape, o.scale, o.decoding, o.turns, o.own_k is None)
        for e, o in layers
    }
    small = sum(entries.tokens.numel() for entries, _ in layers) <= SMALL
    if small and len(kinds) == 1 and layers[0][1].own_k is None and not framed:
        return [range(len(layers))]
    return [range(index, index + 1) for index in range(len(layers))]


def stack(layers: Sequence[Layer]) -> Layer:
    """[L * B, ...] entries and queries of L layers [B, ...], layer after layer. What policies tap is left out."""
    if len(layers) == 1:
        return layers[0]
    (entries, seen), others = layers[0], [entries for entries, _ in layers]
    held = {name: torch.cat([getattr(e, name) for e in others]) for name in vars(entries)}
    asked = {"q": torch.cat([o.q for _, o in layers]), "q_pos": torch.cat([o.q_pos for _, o in layers])}
    return type(entries)(**held), replace(seen, **asked, frame=None, out=None, hidden=None, hidden_pos=None)


def unstack(entries: Entries, count: int) -> list[Entries]:
    """The ``count`` layers of :func:`stack`, each as wide as its longest row."""
    if count == 1:
        return [entries]
    widths = entries.lengths.amax(1).reshape(count, -1).amax(1).tolist()
    parts = {name: value.chunk(count) for name, value in vars(entries).items()}
    return [
        type(entries)(**{name: part[index][:, :, :width] for name, part in parts.items()})
        for index, width in enumerate(widths)
    ]
