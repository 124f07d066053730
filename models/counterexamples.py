"""Decoders the compiler must refuse: each is the plain decoder with one piece replaced by something unsafe.

Each function returns a module in eval mode with transformers' call signature (see
`kvpass.models.plain.PlainDecoder`) and says in its docstring why a KV cache, or dropping from one, is wrong.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvpass.models.plain import (
    AttentionLayer,
    PlainDecoder,
    Shape,
    attend_sdpa,
    causal_mask,
    decoder,
    masked_scores,
)
from kvpass.models.seed import seeded

PREFIX = 4
FIRST_TEXT_TOKEN = 16  # ids below stand for pieces of an image


def bidirectional() -> nn.Module:
    """Every token reads every other: a token's keys and values change whenever a later token is added."""
    return decoder(mask=lambda causal, hidden: torch.ones_like(causal))


def prefix_lm() -> nn.Module:
    """The first 4 tokens see each other: their keys and values are only final once all 4 are known."""

    def mask(causal: Tensor, hidden: Tensor) -> Tensor:
        at = torch.arange(causal.shape[-1], device=causal.device)
        inside = at < PREFIX
        return causal | (inside[:, None] & inside[None, :])

    return decoder(mask=mask)


def data_dependent_mask() -> nn.Module:
    """Tokens hide themselves by their hidden state: the mask cannot be rebuilt from positions alone."""

    def mask(causal: Tensor, hidden: Tensor) -> Tensor:
        itself = causal & causal.transpose(-1, -2)
        readable = hidden[:, None, None, :, 0] > 0
        return causal & (readable | itself)

    return decoder(mask=mask)


def unread_step() -> nn.Module:
    """Scores pass through a sigmoid before the softmax: the attention computed is not softmax(QK^T)V."""

    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
        scores = torch.sigmoid(torch.matmul(q, k.transpose(-1, -2)) * scale)
        return torch.matmul(scores.masked_fill(~keep, torch.finfo(q.dtype).min).softmax(dim=-1), v)

    return decoder(attend)


def mixed_heads() -> nn.Module:
    """Each head's scores are averaged with its neighbour's: heads can no longer keep different tokens."""

    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
        scores = masked_scores(q, k, keep, scale)
        return torch.matmul((0.5 * scores + 0.5 * scores.roll(1, dims=1)).softmax(dim=-1), v)

    return decoder(attend)


def stochastic() -> nn.Module:
    """Dropout on the attention weights stays on at inference: no two runs agree, so none can be checked."""

    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
        weights = masked_scores(q, k, keep, scale).softmax(dim=-1)
        return torch.matmul(F.dropout(weights, p=0.1, training=True), v)

    return decoder(attend)


class _ShortConvolution(nn.Module):
    """Each token mixed with the two before it, channel by channel: [B, S, E] -> [B, S, E]."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.taps = nn.Conv1d(shape.hidden, shape.hidden, kernel_size=3, groups=shape.hidden)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.taps(F.pad(hidden.transpose(1, 2), (2, 0))).transpose(1, 2)


def recurrent() -> nn.Module:
    """Its second layer is a causal convolution: tokens meet outside attention, in state no KV cache holds."""
    shape = Shape()
    return seeded(
        lambda: PlainDecoder(shape, [AttentionLayer(shape, attend_sdpa, causal_mask), _ShortConvolution(shape)])
    )


class _ImageTokens(PlainDecoder):
    def forward(self, input_ids, position_ids=None, attention_mask=None, use_cache=False, **kw):
        at = torch.arange(input_ids.shape[1], device=input_ids.device)
        image = input_ids < FIRST_TEXT_TOKEN
        keep = (at[None, :] <= at[:, None]) | (image[:, :, None] & image[:, None, :])
        keep = keep if attention_mask is None else keep & attention_mask[:, None, :].bool()
        return super().forward(input_ids, position_ids, keep[:, None], use_cache, **kw)


def image_tokens() -> nn.Module:
    """Tokens of an image see each other, later ones included: which keys are final depends on the ids."""
    shape = Shape()
    return seeded(lambda: _ImageTokens(shape, [AttentionLayer(shape, attend_sdpa, causal_mask) for _ in range(2)]))


COUNTEREXAMPLES = (
    bidirectional,
    prefix_lm,
    data_dependent_mask,
    image_tokens,
    unread_step,
    mixed_heads,
    stochastic,
    recurrent,
)
