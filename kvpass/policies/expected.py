"""Keep what queries to come are expected to attend to (Expected Attention, kvpress; arXiv 2510.00636)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.score import working_dtype
from kvpass.policies.base import Policy
from kvpass.policies.reference import spread


@dataclass(frozen=True)
class ExpectedAttention(Policy):
    """Softmax of the expected logit of a Gaussian query, times the norm of the value.

    Mean and covariance of a head's queries are taken before rotation and turned to the average of the ``future``
    positions after the prompt; with mean m and covariance C a key's log-weight is
    ``scale m·k + scale² kᵀCk / 2``. Averaged over the heads of a group; no recent window. Statistics come from
    ``references`` queries spread over the prompt after its first 4, where the published code takes all of them.
    Where keys do not turn, queries serve as they are.
    """

    window: int = 1
    references: int = 1024
    future: int = 512
    epsilon: float = 0.0  # added to the weight before it meets the value's norm

    name: ClassVar[str] = "expected"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.references < 1 or self.future < 1 or self.epsilon < 0:
            raise ValueError(
                f"references and future must be >= 1 and epsilon >= 0, got references={self.references} "
                f"future={self.future} epsilon={self.epsilon}"
            )

    def observe(self, length: int) -> Tensor:
        skipped = min(self.sinks, length - 1)
        return spread(length - skipped, self.references, 1) + skipped

    def score(self, entries: Entries, seen: Observation) -> Tensor:
        batch, heads, slots, dim = entries.k.shape
        dtype = working_dtype(entries.k)
        mean, covariance = self._query(seen, dtype)
        mean = mean.reshape(batch, heads, -1, dim)  # [B, Hkv, G, D]
        covariance = covariance.reshape(batch, heads, -1, dim, dim)
        k = entries.k.to(dtype)
        hidden = ~entries.valid | (entries.valid.cumsum(-1) <= self.sinks)
        weight = k.new_zeros(batch, heads, slots)
        for g in range(mean.shape[2]):
            spread_out = (k @ covariance[:, :, g] * k).sum(-1)
            logit = seen.scale * (k @ mean[:, :, g, :, None]).squeeze(-1) + seen.scale**2 / 2 * spread_out
            logit = (logit + entries.log_votes).masked_fill(hidden, -torch.inf)
            weight += logit.softmax(-1).nan_to_num(0)  # nothing but sinks: no weights
        weight = weight / mean.shape[2] + self.epsilon
        return self.pin(entries, weight * entries.v.to(dtype).norm(dim=-1))

    def _query(self, seen: Observation, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Mean [B, Hq, D] and covariance [B, Hq, D, D] of queries at the average position to come."""
        used = (seen.q_pos >= 0).to(dtype)[:, None, :, None]
        count = used.sum(2).clamp(min=1)
        q = upright(seen).q.to(dtype) * used
        mean = q.sum(2) / count
        off = (q - mean.unsqueeze(2)) * used
        covariance = off.transpose(2, 3) @ off / count.unsqueeze(-1)
        if seen.frame is None:
            return mean, covariance
        dim = q.shape[-1]
        coming = seen.q_pos.amax(-1, keepdim=True) + 1 + torch.arange(self.future, device=q.device)
        axes = torch.eye(dim, dtype=dtype, device=q.device)
        turned = seen.frame.turn(axes.expand(*coming.shape, dim, dim), coming.unsqueeze(-1)).mean(1).unsqueeze(1)
        return (mean.unsqueeze(2) @ turned).squeeze(2), turned.transpose(2, 3) @ covariance @ turned


def upright(seen: Observation) -> Observation:
    """The observed queries turned back to position 0, where those of all positions agree on their axes."""
    if seen.frame is None:
        return seen
    return replace(seen, q=seen.frame.turn(seen.q, -seen.q_pos.clamp(min=0)[:, None]))
