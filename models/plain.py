"""A minimal decoder in plain PyTorch whose mask, attention and layers can each be swapped.

The decoders of `PLAIN` spell correct causal attention in six ways and the compiler must accept them; the decoders in
`kvpass.models.counterexamples` are the same class with one piece replaced.

Shapes below: B sequences of S tokens, H query heads, G KV heads, D values per head, E hidden values.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvpass.models.seed import seeded


@dataclass(frozen=True)
class Shape:
    """Sizes of a plain decoder."""

    vocab: int = 128
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    rope_base: float = 10000.0


@dataclass(frozen=True)
class Output:
    """What a plain decoder returns: `logits` is float32 [B, S, vocab]."""

    logits: Tensor


MaskRule = Callable[[Tensor, Tensor], Tensor]
"""(causal bool [S, S], hidden [B, S, E]) -> bool [.., S, S]: which keys (last axis) each query may read."""

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""(q, k, v: [B, H, S, D], keep: bool [B or 1, 1, S, S], scale) -> [B, H, S, D]."""


def causal_mask(causal: Tensor, hidden: Tensor) -> Tensor:
    """Each query reads itself and what comes before it."""
    return causal


def masked_scores(q: Tensor, k: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Scaled scores [B, H, S, S] with the lowest float where `keep` is False."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    return scores.masked_fill(~keep, torch.finfo(scores.dtype).min)


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    """PyTorch's fused attention."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=scale)


def attend_matmul(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    """The same attention, step by step."""
    return torch.matmul(masked_scores(q, k, keep, scale).softmax(dim=-1), v)


def attend_einsum(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Both products as einsum, over [B, S, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v).transpose(1, 2)


def attend_bmm(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Batch and head in one dimension: baddbmm with the mask as what is added, and bmm."""
    batch, heads, length, size = q.shape
    q, k, v = (x.reshape(batch * heads, length, size) for x in (q, k, v))
    mask = torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, torch.finfo(q.dtype).min)
    mask = mask.expand(batch, heads, length, length).reshape(batch * heads, length, length)
    weights = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale).softmax(dim=-1)
    return torch.bmm(weights, v).view(batch, heads, length, size)


def attend_safe_softmax(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    """The square root of the scale on each side, and the softmax step by step."""
    scores = torch.matmul(q * scale**0.5, (k * scale**0.5).transpose(-1, -2))
    scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    return torch.matmul(weights / weights.sum(dim=-1, keepdim=True), v)


def attend_alibi(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Scores plus a slope per head times the key's column."""
    slopes = 0.5 ** torch.arange(1, q.shape[1] + 1)
    bias = slopes[:, None, None] * torch.arange(k.shape[2])
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale + bias
    scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
    return torch.matmul(scores.softmax(dim=-1), v)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def _repeat_heads(x: Tensor, times: int) -> Tensor:
    batch, heads, length, size = x.shape
    return x[:, :, None].expand(batch, heads, times, length, size).reshape(batch, heads * times, length, size)


class AttentionLayer(nn.Module):
    """Rotary grouped-query attention: hidden [B, S, E] -> [B, S, E]."""

    def __init__(self, shape: Shape, attend: Attention, mask: MaskRule):
        super().__init__()
        self.shape, self.attend, self.mask = shape, attend, mask
        self.q = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention_mask: Tensor | None) -> Tensor:
        batch, length, _ = hidden.shape
        split = (batch, length, -1, self.shape.head_dim)
        q, k, v = (project(hidden).view(split).transpose(1, 2) for project in (self.q, self.k, self.v))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        times = self.shape.heads // self.shape.kv_heads
        keep = self._keep(hidden, attention_mask)
        out = self.attend(q, _repeat_heads(k, times), _repeat_heads(v, times), keep, self.shape.head_dim**-0.5)
        return self.o(out.transpose(1, 2).reshape(batch, length, -1))

    def _keep(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        if attention_mask is not None and attention_mask.ndim == 4:
            return attention_mask
        at = torch.arange(hidden.shape[1], device=hidden.device)
        keep = self.mask(at[None, :] <= at[:, None], hidden)
        keep = keep[None, None] if keep.ndim == 2 else keep
        return keep if attention_mask is None else keep & attention_mask[:, None, None, :].bool()


class GroupedAttentionLayer(AttentionLayer):
    """The same attention with one projection for query, key and value, and products over [B, G, H / G, S, S]."""

    def __init__(self, shape: Shape, mask: MaskRule):
        super().__init__(shape, attend_sdpa, mask)
        self.group = shape.heads // shape.kv_heads
        self.qkv = nn.Linear(shape.hidden, shape.kv_heads * (self.group + 2) * shape.head_dim, bias=False)
        del self.q, self.k, self.v

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention_mask: Tensor | None) -> Tensor:
        batch, length, _ = hidden.shape
        split = (batch, length, self.shape.kv_heads, self.group + 2, self.shape.head_dim)
        q, k, v = self.qkv(hidden).view(split).permute(0, 2, 3, 1, 4).split((self.group, 1, 1), dim=2)
        q, k = _rotate(q, cos[:, None], sin[:, None]), _rotate(k, cos[:, None], sin[:, None])
        scores = torch.matmul(q, k.transpose(-1, -2)) * self.shape.head_dim**-0.5
        keep = self._keep(hidden, attention_mask)[:, None]
        weights = scores.masked_fill(~keep, torch.finfo(scores.dtype).min).softmax(dim=-1)
        return self.o(torch.matmul(weights, v).permute(0, 3, 1, 2, 4).reshape(batch, length, -1))


class Block(nn.Module):
    """Pre-norm residual block: `mixer` moves information between tokens, the MLP does not."""

    def __init__(self, shape: Shape, mixer: nn.Module):
        super().__init__()
        self.mixer_norm, self.mixer = nn.LayerNorm(shape.hidden), mixer
        self.mlp_norm = nn.LayerNorm(shape.hidden)
        self.mlp = nn.Sequential(
            nn.Linear(shape.hidden, 2 * shape.hidden), nn.GELU(), nn.Linear(2 * shape.hidden, shape.hidden)
        )

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention_mask: Tensor | None) -> Tensor:
        hidden = hidden + self.mixer(self.mixer_norm(hidden), cos, sin, attention_mask)
        return hidden + self.mlp(self.mlp_norm(hidden))


class PlainDecoder(nn.Module):
    """A decoder with transformers' call signature and no cache.

    input_ids and position_ids are int64 [B, S] (positions default to 0..S-1). attention_mask is None, a
    padding mask [B, S] (nonzero = token) or a bool mask [B, 1, S, S] that replaces the decoder's own.
    Raises TypeError when given past_key_values.
    """

    def __init__(self, shape: Shape, mixers: list[nn.Module]):
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, mixer) for mixer in mixers)
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        self.register_buffer("inverse_frequency", shape.rope_base**-steps, persistent=False)

    def forward(self, input_ids, position_ids=None, attention_mask=None, use_cache=False, **kw) -> Output:
        if kw.get("past_key_values") is not None:
            raise TypeError("a plain decoder has no cache: call it with the whole sequence")
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        angle = position_ids[:, None, :, None].float() * self.inverse_frequency
        angle = torch.cat((angle, angle), dim=-1)
        cos, sin = angle.cos(), angle.sin()
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden, cos, sin, attention_mask)
        return Output(self.head(self.norm(hidden)))


def decoder(attend: Attention = attend_sdpa, mask: MaskRule = causal_mask, shape: Shape | None = None):
    """A PlainDecoder whose every layer uses `attend` under `mask`; eval mode, float32, fixed weights."""
    shape = shape or Shape()
    return seeded(lambda: PlainDecoder(shape, [AttentionLayer(shape, attend, mask) for _ in range(shape.layers)]))


def plain_sdpa() -> nn.Module:
    """Causal decoder through `scaled_dot_product_attention`; the compiler must accept it."""
    return decoder(attend_sdpa)


def plain_matmul() -> nn.Module:
    """The same decoder with the same weights through matmul, mask, softmax, matmul; must be accepted."""
    return decoder(attend_matmul)


def plain_einsum() -> nn.Module:
    """The same decoder through einsum, heads after tokens."""
    return decoder(attend_einsum)


def plain_bmm() -> nn.Module:
    """The same decoder with batch and head in one dimension, through baddbmm and bmm."""
    return decoder(attend_bmm)


def plain_safe_softmax() -> nn.Module:
    """The same decoder with a scale on query and on key, and the softmax spelled out."""
    return decoder(attend_safe_softmax)


def plain_grouped() -> nn.Module:
    """A decoder with one projection for query, key and value and five-dimensional products over the groups."""
    shape = Shape()
    layers = range(shape.layers)
    return seeded(lambda: PlainDecoder(shape, [GroupedAttentionLayer(shape, causal_mask) for _ in layers]))


def plain_alibi() -> nn.Module:
    """A decoder whose scores also depend on how far back a key is."""
    return decoder(attend_alibi)


PLAIN = (plain_sdpa, plain_matmul, plain_einsum, plain_bmm, plain_safe_softmax, plain_grouped)
