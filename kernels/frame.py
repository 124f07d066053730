"""How stored keys turn with their position, so that keys of different positions can be compared and averaged."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Frame:
    """Rotation of a layer's keys: at position ``p`` each pair of channels stands ``p * freq`` radians on.

    A stored key is ``turn(gain * x, p)`` of the un-rotated key ``x``; the gain is on the paired channels only.
    """

    first: Tensor  # [P] int64 channel of each rotated pair
    second: Tensor  # [P] int64 channel that ``first`` turns towards
    freq: Tensor  # [P] fp64 radians per position
    gain: float = 1.0  # factor on rotated channels that is already in the stored key (YaRN and its kin)

    def turn(self, x: Tensor, by: Tensor) -> Tensor:
        """``x`` [..., N, D] rotated by ``by`` positions ([..., N] int, broadcastable; may be negative).

        ``turn(k, -pos)`` takes a stored key to position 0, where keys of all positions agree on their axes;
        ``turn(x, pos)`` takes it back. Angles are fp64, arithmetic is fp32 (fp64 for fp64), the result has the
        dtype of ``x``. Channels in no pair pass through. Shapes that do not broadcast raise RuntimeError.
        """
        first, second = self.first.to(x.device), self.second.to(x.device)
        cos, sin = self._tables(by.to(x.device), torch.float64 if x.dtype == torch.float64 else torch.float32)
        a, b = x.index_select(-1, first).to(cos.dtype), x.index_select(-1, second).to(cos.dtype)
        ahead, across = a * cos - b * sin, a * sin + b * cos
        out = x.expand(*ahead.shape[:-1], x.shape[-1]).clone()
        out.index_copy_(-1, first, ahead.to(x.dtype))
        return out.index_copy_(-1, second, across.to(x.dtype))

    def _tables(self, by: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [..., N, P]. Positions repeat over rows, so angles are taken once for each in their range."""
        freq = self.freq.to(by.device)
        if not by.numel():
            empty = freq.new_zeros(*by.shape, len(freq), dtype=dtype)
            return empty, empty
        low, high = int(by.min()), int(by.max())
        if high - low >= by.numel():
            angle = by.to(torch.float64).unsqueeze(-1) * freq
            return angle.cos().to(dtype), angle.sin().to(dtype)
        angle = torch.arange(low, high + 1, device=by.device, dtype=torch.float64).unsqueeze(-1) * freq
        index = (by.long() - low).flatten()
        cos, sin = (table.to(dtype).index_select(0, index) for table in (angle.cos(), angle.sin()))
        return cos.reshape(*by.shape, -1), sin.reshape(*by.shape, -1)
