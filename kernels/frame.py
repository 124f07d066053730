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
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = self._tables(by.to(x.device), dtype)
        first, second = _columns(self.first), _columns(self.second)
        a, b = x[..., first], x[..., second]
        out = x.expand(*torch.broadcast_shapes(x.shape[:-1], by.shape), x.shape[-1]).clone()
        out[..., first] = (a * cos).addcmul_(b, sin, value=-1)
        out[..., second] = (b * cos).addcmul_(a, sin)
        return out

    def _tables(self, by: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [..., N, P]. Positions repeat over rows, so angles are taken once for each in their range."""
        freq = self.freq.to(by.device)
        by = by[tuple(slice(1) if stride == 0 else slice(None) for stride in by.stride())]
        low, high = (int(end) for end in by.aminmax()) if by.numel() else (0, -1)
        if high - low >= by.numel():
            angle = by.to(torch.float64).unsqueeze(-1) * freq
            return angle.cos().to(dtype), angle.sin().to(dtype)
        angle = torch.arange(low, high + 1, device=by.device, dtype=torch.float64).unsqueeze(-1) * freq
        index = (by.long() - low).flatten()
        cos, sin = (table.to(dtype).index_select(0, index) for table in (angle.cos(), angle.sin()))
        shape = (*by.shape, len(freq))
        return cos.reshape(shape), sin.reshape(shape)


def _columns(index: Tensor) -> slice | Tensor:
    """An index for the last dimension; evenly spaced channels, which nearly all models have, need no gathering."""
    if not index.numel():
        return slice(0)
    start = int(index[0])
    step = int(index[1]) - start if index.numel() > 1 else 1
    if step < 1 or not torch.equal(index, start + step * torch.arange(index.numel(), device=index.device)):
        return index
    return slice(start, start + step * index.numel(), step)
