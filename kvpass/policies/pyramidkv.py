"""SnapKV's choice with more entries in lower layers (PyramidKV, arXiv 2406.02069)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.policies.allocate import fit, uniform
from kvpass.policies.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Entries of a layer fall linearly, from ``2c - c // beta`` in the first to ``c // beta`` in the last.

    ``c`` is the average beside sinks and window, which every row keeps on top. As in the published code a prompt
    shorter than ``2c`` is shared evenly, and no row is asked for more than it has. The published code rounds the
    step between layers down, which stores more than the budget; here each layer is rounded, and what that leaves
    is taken from or given to all rows alike, so that totals are exact.
    """

    beta: int = 20

    name: ClassVar[str] = "pyramidkv"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise ValueError(f"beta must be >= 1, got {self.beta}")
        if self.allocator != "uniform":
            raise ValueError(f"pyramidkv allocates by layer itself, got allocator={self.allocator!r}")

    def allocate(self, scores: Sequence[Tensor], totals: Sequence[int]) -> list[Tensor]:
        widths = [score.shape[1] for score in scores]
        available = torch.cat([(~score.isneginf()).sum(-1) for score in scores], 1)
        pinned = torch.cat([score.isposinf().sum(-1) for score in scores], 1)
        even = torch.cat(uniform(scores, totals), 1)
        total = torch.as_tensor(totals, dtype=torch.int64, device=available.device)
        # One sequence has one average c; its rows are equally long unless a cache is compressed again.
        average = total // sum(widths) - pinned.amax(-1)
        least = average // self.beta
        most = 2 * average - least
        room = available.amin(-1) - pinned.amax(-1)
        least, most = torch.where(most >= room, 2 * average - room, least), torch.minimum(most, room)
        fall = (most - least)[:, None]
        layer = torch.arange(len(scores), device=total.device)
        layer = layer.repeat_interleave(torch.tensor(widths, device=total.device))
        wanted = pinned + most[:, None] - layer * fall // max(1, len(scores) - 1)
        flat = (average < 1) | (available.amin(-1) < 2 * average)
        split = torch.where(flat[:, None], even, fit(wanted, total, available))
        return list(split.split(widths, 1))
