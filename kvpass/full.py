"""Every exact key and value of a cache, outside of it: in host memory or in a file, appended as tokens come.

A log of blocks that are never changed, so forks and beams share them; an index tells which of a
block's sequences is whose.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvpass.kernels.entries import Entries
from kvpass.kernels.layout import Store, pack


@dataclass(frozen=True)
class Block:
    """Consecutive tokens of some sequences, as [B, Hkv, n, D] a layer."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    pos: Tensor  # [B, n] int32, -1 = padding

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


class Spill:
    """A file without a name, so that it goes with its last user, however that one ends."""

    def __init__(self, folder: Path):
        self.handle, name = tempfile.mkstemp(dir=folder)
        Path(name).unlink()
        weakref.finalize(self, os.close, self.handle)  # the pages that are mapped stay
        self.end = 0
        self.lock = threading.Lock()  # forks append to one file

    def write(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors again, as copy-on-write pages of the file.

        Raises:
            OSError: the disk is full, or the file may not grow.
        """
        with self.lock:
            start, at = self._append(tensors)
        if at == start:
            return tensors
        pages = mmap.mmap(self.handle, at - start, access=mmap.ACCESS_COPY, offset=start)
        held, place = [], 0
        for tensor in tensors:
            flat = torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel(), offset=place)
            held.append(flat.view(tensor.shape))
            place += tensor.nbytes
        return held

    def _append(self, tensors: list[Tensor]) -> tuple[int, int]:
        start = at = -(-self.end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        for tensor in tensors:
            rest = memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())
            while rest:
                written = os.pwrite(self.handle, rest, at)
                at, rest = at + written, rest[written:]
        self.end = at
        return start, at


class Full:
    """The exact keys and values of all full-attention layers of one cache, except those still in its tail.

    A failure to write or to read ends it: one warning, what was held is released, and ``stopped`` says why.
    """

    def __init__(self, where: str | os.PathLike, limit: int | None):
        self.where, self.limit = where, limit
        self.blocks: list[tuple[Block, Tensor | None]] = []  # and which of its sequences each of ours is
        self.file: Spill | None = None
        self.stopped = ""
        self.written = self.read = 0  # bytes
        self.seconds = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks it refers to; forks share them."""
        return sum(block.nbytes for block, _ in self.blocks)

    def append(self, keys: list[Tensor], values: list[Tensor], pos: Tensor) -> None:
        """Add tokens: [B, Hkv, n, D] a layer, and their positions [B, n]."""
        if self.stopped or not pos.shape[1]:
            return
        started = time.perf_counter()
        tensors = [*keys, *values]
        size = sum(tensor.nbytes for tensor in tensors)
        if self.limit is not None and self.nbytes + size > self.limit:
            self.stop(f"the limit of {self.limit} bytes is reached")
            return
        try:
            held = [tensor.detach().contiguous().cpu() for tensor in tensors]
            if self.where != "memory":
                self.file = self.file or Spill(Path(self.where))
                held = self.file.write(held)
        except (OSError, MemoryError, RuntimeError) as error:
            self.stop(f"{self.where}: {error}")
            return
        half = len(keys)
        self.blocks.append((Block(tuple(held[:half]), tuple(held[half:]), pos.clone()), None))
        self.written += size
        self.seconds += time.perf_counter() - started

    def load(self, like: Tensor) -> list[Store] | None:
        """Packed exact rows a layer on the device of ``like``; None when it has stopped."""
        if self.stopped or not self.blocks:
            return None
        started = time.perf_counter()
        try:
            pos = torch.cat([_rows(block.pos, rows) for block, rows in self.blocks], 1)
            stores = [self._layer(index, pos, like.device) for index in range(len(self.blocks[0][0].keys))]
        except (OSError, MemoryError, RuntimeError) as error:
            self.stop(f"{self.where}: {error}")
            return None
        self.read += sum(store.k.nbytes + store.v.nbytes for store in stores)
        self.seconds += time.perf_counter() - started
        return stores

    def _layer(self, index: int, pos: Tensor, device: torch.device) -> Store:
        k, v = (
            torch.cat([_rows(getattr(block, name)[index], rows) for block, rows in self.blocks], 2).to(device)
            for name in ("keys", "values")
        )
        shape = k.shape[:3]
        tokens = (pos >= 0).to(torch.int32)[:, None].expand(shape)
        votes = torch.zeros(shape, device=device)
        return pack(Entries(k=k, v=v, log_votes=votes, tokens=tokens, pos=pos[:, None].expand(shape)))

    def select(self, indices: Tensor) -> None:
        """Sequence b becomes what sequence ``indices[b]`` was."""
        indices = indices.cpu()
        self.blocks = [(block, indices if rows is None else rows[indices]) for block, rows in self.blocks]

    def fork(self) -> Full:
        """Another one with the same blocks; both go on alone."""
        twin = Full(self.where, self.limit)
        twin.blocks, twin.file, twin.stopped = list(self.blocks), self.file, self.stopped
        return twin

    def stop(self, reason: str) -> None:
        """Give up, and say so once."""
        self.stopped, self.blocks, self.file = reason, [], None
        warnings.warn(f"kvpass goes on without refreshing: {reason}", RuntimeWarning, stacklevel=2)


def _rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else tensor[rows.to(tensor.device)]
