"""Near misses: attention as a decoder might really spell it, with one step changed.

Each is a decoder whose layers compute something close to softmax(QK^T)V under a causal mask. Changes that only look
unusual may be read; the others must be refused. `test_mutations` accepts nothing in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
)
from kvpass.models.seed import seeded

ONE_LAYER = Shape(layers=1)
LOWEST = torch.finfo(torch.float32).min
CAP = 5.0


@dataclass(frozen=True)
class Parts:
    """What a mutation may use besides the scores."""

    q: Tensor  # [B, H, S, D]
    k: Tensor
    v: Tensor
    keep: Tensor  # bool [B or 1, 1, S, S]

    @property
    def distance(self) -> Tensor:
        """[S, S] query index minus key index."""
        at = torch.arange(self.q.shape[2], device=self.q.device)
        return at[:, None] - at[None]


# -- three spellings of the contractions -------------------------------------------------------------------------------


def _matmul(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, k.transpose(-1, -2))


def _einsum(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bhqd,bhkd->bhqk", q, k)


def _bmm(q: Tensor, k: Tensor) -> Tensor:
    batch, heads, length, dim = q.shape
    flat = torch.bmm(q.reshape(-1, length, dim), k.reshape(-1, length, dim).transpose(1, 2))
    return flat.view(batch, heads, length, length)


SPELLINGS = {"matmul": _matmul, "einsum": _einsum, "bmm": _bmm}

# -- scores, after the scale and before the mask; then mask, softmax, product ---

SCORES: dict[str, Callable[[Tensor, Parts], Tensor]] = {
    "untouched": lambda s, p: s,
    "soft cap": lambda s, p: CAP * torch.tanh(s / CAP),
    "soft cap of two constants": lambda s, p: 3.0 * torch.tanh(s / CAP),
    "bias after the cap": lambda s, p: CAP * torch.tanh(s / CAP) - 0.1 * p.distance.abs(),
    "bias before the cap": lambda s, p: CAP * torch.tanh((s - 0.1 * p.distance.abs()) / CAP),
    "clamped": lambda s, p: s.clamp(-1.0, 1.0),
    "scale depends on data": lambda s, p: s / (1.0 + p.q.abs().mean()),
    "scale depends on the length": lambda s, p: s * torch.log(torch.ones(()) * s.shape[-1]),
    "scale of each head": lambda s, p: s * torch.arange(1, 1 + s.shape[1]).view(1, -1, 1, 1),
    "scaled twice": lambda s, p: (s * 0.5) / 0.25,
    "shifted by a constant": lambda s, p: s + 3.0,
    "shifted by each query's maximum": lambda s, p: s - s.amax(-1, keepdim=True),
    "bias of each key's position": lambda s, p: s + 0.1 * torch.arange(s.shape[-1]),
    "bias of the square of the distance": lambda s, p: s - 0.01 * p.distance.square(),
    "bias of the data": lambda s, p: s + p.k[..., 0].unsqueeze(-2),
    "relative position table": lambda s, p: s + torch.linspace(1, -1, 8)[p.distance.clamp(0, 7)],
    "scores of other heads": lambda s, p: s + s.roll(1, dims=1),
    "top eight only": lambda s, p: s.masked_fill(s < s.topk(min(8, s.shape[-1]), -1).values[..., -1:], LOWEST),
    "mean over keys removed": lambda s, p: s - s.mean(-1, keepdim=True),
}


def _masked(scores: Tensor, keep: Tensor) -> Tensor:
    return scores.masked_fill(~keep, LOWEST)


def _without(scores: Tensor, p: Parts) -> Tensor:
    return scores


MASKS: dict[str, Callable[[Tensor, Parts], Tensor]] = {
    "mask before the cap": lambda s, p: CAP * torch.tanh(_masked(s, p.keep) / CAP),
    "no mask": _without,
    "a soft mask": lambda s, p: s - 5.0 * (~p.keep),
    "a mask of zeros": lambda s, p: s.masked_fill(~p.keep, 0.0),
    "a mask of -1e4": lambda s, p: s + -1e4 * (~p.keep),
    "multiplied by the mask": lambda s, p: s * p.keep,
    "the mask where, scaled after": lambda s, p: 2.0 * torch.where(p.keep, s, LOWEST / 4),
}

SOFTMAX: dict[str, Callable[[Tensor, Parts], Tensor]] = {
    "over queries": lambda s, p: s.softmax(-2),
    "over heads": lambda s, p: s.softmax(1),
    "sigmoid": lambda s, p: s.sigmoid(),
    "one more in the denominator": lambda s, p: s.exp() / (1.0 + s.exp().sum(-1, keepdim=True)),
    "in double precision": lambda s, p: s.double().softmax(-1).float(),
    "without NaN": lambda s, p: s.softmax(-1).nan_to_num(0.0),
    "masked after": lambda s, p: s.softmax(-1) * p.keep,
    "half of the weights": lambda s, p: 0.5 * s.softmax(-1),
    "weights plus a uniform share": lambda s, p: 0.9 * s.softmax(-1) + 0.1 * p.keep / p.keep.sum(-1, keepdim=True),
    "dropout that stays on": lambda s, p: F.dropout(s.softmax(-1), 0.2, training=True),
    "dropout of no probability": lambda s, p: F.dropout(s.softmax(-1), 0.0, training=True),
}

PRODUCT: dict[str, Callable[[Tensor, Parts], Tensor]] = {
    "a second consumer of the weights": lambda w, p: w @ p.v + w.amax(-1, keepdim=True),
    "values of the token before": lambda w, p: w @ p.v.roll(1, dims=2),
    "values plus keys": lambda w, p: w @ (p.v + p.k),
    "keys as values": lambda w, p: w @ p.k,
    "values of other heads": lambda w, p: w @ p.v.roll(1, dims=1),
    "cumulative output": lambda w, p: (w @ p.v).cumsum(2),
    "output gated by its query": lambda w, p: (w @ p.v) * p.q.sigmoid(),
    "output of the mean head": lambda w, p: (w @ p.v).mean(1, keepdim=True).expand_as(p.q),
}


def _attention(spelling, scores=None, mask=_masked, softmax=None, product=None):
    def attend(q, k, v, keep, scale):
        parts = Parts(q, k, v, keep)
        s = spelling(q, k) * scale
        s = s if scores is None else scores(s, parts)
        s = _masked(s, keep) if mask is _masked else mask(s, parts)
        w = s.softmax(-1) if softmax is None else softmax(s, parts)
        return torch.matmul(w, v) if product is None else product(w, parts)

    return attend


# -- masks of index differences: [S, S] from the causal mask; the same through SDPA and spelled out ---


def _rule(function: Callable[[Tensor, Tensor], Tensor]):
    def mask(causal: Tensor, hidden: Tensor) -> Tensor:
        at = torch.arange(causal.shape[-1], device=causal.device)
        return function(at[:, None], at[None])

    return mask


MASK_RULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "causal": _rule(lambda q, k: k <= q),
    "one token ahead": _rule(lambda q, k: k <= q + 1),
    "one token behind": _rule(lambda q, k: (k < q) | ((k == 0) & (q == 0))),
    "a window of 6": _rule(lambda q, k: (k <= q) & (q - k < 6)),
    "a window of 7, spelled <=": _rule(lambda q, k: (k <= q) & (q - k <= 6)),
    "a window that skips": _rule(lambda q, k: (k <= q) & (q - k < 12) & ((q - k) % 2 == 0)),
    "a window and the first four": _rule(lambda q, k: (k <= q) & ((q - k < 6) | (k < 4))),
    "chunks of 5": _rule(lambda q, k: (k <= q) & (k // 5 == q // 5)),
    "chunks that overlap": _rule(lambda q, k: (k <= q) & (k // 5 >= q // 5 - 1)),
    "a prefix": _rule(lambda q, k: (k <= q) | (k < 3)),
    "all but token 5": _rule(lambda q, k: (k <= q) & ((k != 5) | (q == 5))),
    "a hole 40 tokens back": _rule(lambda q, k: (k <= q) & (q - k != 40)),
    "a window from token 50 on": _rule(lambda q, k: (k <= q) & ((q < 50) | (q - k < 20))),
    "of the data": lambda causal, hidden: (
        causal & (hidden[:, None, None, :, 1] > -0.5) | (causal & causal.transpose(-1, -2))
    ),
}

# -- outside attention -------------------------------------------------------------------------------------------------


class _Around(nn.Module):
    """A mixer with a change around its attention: hidden [B, S, E] -> [B, S, E]."""

    def __init__(self, shape: Shape, before=None, after=None, attend=attend_sdpa):
        super().__init__()
        self.inner, self.before, self.after = AttentionLayer(shape, attend, causal_mask), before, after

    def forward(self, hidden, cos, sin, attention_mask):
        given = hidden if self.before is None else self.before(hidden, cos)
        out = self.inner(given, cos, sin, attention_mask)
        return out if self.after is None else self.after(out, hidden)


def _shifted(hidden: Tensor) -> Tensor:
    return torch.cat([hidden[:, :1], hidden[:, :-1]], 1)


BEFORE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "half of the token before": lambda h, cos: 0.5 * h + 0.5 * _shifted(h),
    "normalised over the sequence": lambda h, cos: h - h.mean(1, keepdim=True),
    "running mean": lambda h, cos: h.cumsum(1) / torch.arange(1, 1 + h.shape[1])[:, None],
    "scaled by the length": lambda h, cos: h * (1.0 + 1.0 / h.shape[1]),
    "reversed": lambda h, cos: h.flip(1),
    "noise": lambda h, cos: h + 0.1 * torch.randn_like(h),
}
AFTER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "maximum over the sequence": lambda o, h: o + h.amax(1, keepdim=True),
    "the first token": lambda o, h: o + h[:, :1],
    "gated by its own token": lambda o, h: o * h.sigmoid(),
    "statistics of the batch": lambda o, h: o - o.mean(0, keepdim=True),
}


def _around(**change) -> nn.Module:
    shape = Shape()
    return seeded(lambda: PlainDecoder(shape, [_Around(shape, **change) for _ in range(2)]))


def _stretched(q, k, v, keep, scale):
    """Keys whose rotation depends on the whole length, as in length-dependent rotary scaling."""
    length = q.shape[2]
    return attend_sdpa(q, k * (1.0 + length / 64.0), v, keep, scale)


OTHERWISE = {"untouched", "soft cap", "mask before the cap", "a second consumer of the weights"}  # einsum, bmm


def _cases() -> dict[str, Callable[[], nn.Module]]:
    """Every case by name."""
    cases = {}
    for spelling, contract in SPELLINGS.items():
        for table, keyword in ((SCORES, "scores"), (MASKS, "mask"), (SOFTMAX, "softmax"), (PRODUCT, "product")):
            # What comes behind the contraction is read alike; one spelling goes through all of it.
            for name in table if spelling == "matmul" else [name for name in table if name in OTHERWISE]:
                attend = _attention(contract, **{keyword: table[name]})
                cases[f"{spelling}, {keyword}: {name}"] = lambda attend=attend: decoder(attend, shape=ONE_LAYER)
    for name, rule in MASK_RULES.items():
        cases[f"sdpa, seen: {name}"] = lambda rule=rule: decoder(mask=rule, shape=ONE_LAYER)
    for name, change in BEFORE.items():
        cases[f"around: {name}"] = lambda change=change: _around(before=change)
    for name, change in AFTER.items():
        cases[f"around: {name}"] = lambda change=change: _around(after=change)
    cases["keys stretched by the length"] = lambda: decoder(_stretched, shape=ONE_LAYER)
    return cases


CASES = _cases()
