"""The vocabulary of compression: candidate entries of one layer and the queries that judge them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.kernels.frame import Frame


@dataclass(frozen=True)
class Entries:
    """Cache entries of one layer, padded to its longest row.

    A row is one (sequence, KV head). An unused slot has ``tokens == 0``, ``pos == -1`` and ``log_votes == -inf``;
    its key and value are finite but meaningless. Entries of a row are ordered by position.
    """

    k: Tensor  # [B, Hkv, N, Dk] key as stored (after rotation)
    v: Tensor  # [B, Hkv, N, Dv]
    log_votes: Tensor  # [B, Hkv, N] fp32, added to the attention logit; 0 for a plain token
    tokens: Tensor  # [B, Hkv, N] int32, how many tokens the entry stands for
    pos: Tensor  # [B, Hkv, N] int32, representative position

    @property
    def valid(self) -> Tensor:
        """[B, Hkv, N] bool: slots that hold an entry."""
        return self.tokens > 0

    @property
    def lengths(self) -> Tensor:
        """[B, Hkv] int64: entries in each row."""
        return self.valid.sum(-1)

    def take(self, index: Tensor, used: Tensor) -> Entries:
        """Entries at ``index`` [B, Hkv, M] (int64) where ``used`` [B, Hkv, M]; the other slots become unused."""
        row = index.unsqueeze(-1)
        return Entries(
            k=self.k.gather(2, row.expand(-1, -1, -1, self.k.shape[-1])),
            v=self.v.gather(2, row.expand(-1, -1, -1, self.v.shape[-1])),
            log_votes=self.log_votes.gather(2, index).masked_fill(~used, -torch.inf),
            tokens=self.tokens.gather(2, index).masked_fill(~used, 0),
            pos=self.pos.gather(2, index).masked_fill(~used, -1),
        )


@dataclass(frozen=True)
class Predicted(Entries):
    """Entries with what their attention is predicted from, see :mod:`kvpass.kernels.predict`."""

    ema: Tensor  # [B, Hkv, N, 2] fp32

    def take(self, index: Tensor, used: Tensor) -> Predicted:
        ema = self.ema.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, 2))
        return Predicted(**vars(super().take(index, used)), ema=ema)

    @property
    def plain(self) -> Entries:
        """Without predictions."""
        return Entries(**{name: getattr(self, name) for name in Entries.__dataclass_fields__})


@dataclass(frozen=True)
class Observation:
    """What the prompt shows of one layer, for judging its entries."""

    q: Tensor  # [B, Hq, W, Dk] queries after rotation, as the attention saw them
    q_pos: Tensor  # [B, W] int32 positions; -1 = slot unused (sequence shorter than W)
    scale: float  # logit = scale * q . k
    frame: Frame | None = None  # None: keys do not turn with their position, or how they do could not be read
    out: Tensor | None = None  # [Hq, Dv, E] output projection of each query head, a view of the model's weight
    # [B, S, E] the attention's input at the prompt's columns, where the policy taps this layer; None while decoding
    hidden: Tensor | None = None
    hidden_pos: Tensor | None = None  # [B, S] int32 position of each column of ``hidden``; -1 = padding
    turns: bool = False  # the key depends on its position
    # [B, Hkv, R, Dk] keys and [B, R] int32 positions (-1 = unused) of observed tokens that are no entries: a
    # rehearsal's, a continuation's. They see each other causally. None: only entries are seen.
    own_k: Tensor | None = None
    own_pos: Tensor | None = None
    decoding: bool = False  # the queries are those of decoded tokens, not of a prompt
