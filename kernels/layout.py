"""How rows lie in memory: appending to the tail, packing padded entries into a store and back."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.kernels.entries import Entries, Predicted


def fits(
    types: Container[torch.dtype],
    device: torch.device,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    store_k: Tensor,
    store_v: Tensor,
    log_votes: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
) -> bool:
    """Whether what ``kvpass::attend`` is given lies on ``device``, dense along its last axis, each of new tokens, store
    and tail in one of ``types``, log-votes in fp32, heads in whole groups, and nobody wants gradients."""
    groups = ((q, k, v), (store_k, store_v), (tail_k, tail_v), (log_votes,))
    return (
        all(t.device == device and t.stride(-1) == 1 for group in groups for t in group)
        and all(group[0].dtype in types and len({t.dtype for t in group}) == 1 for group in groups)
        and log_votes.dtype == torch.float32
        and q.shape[1] % k.shape[1] == 0
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)))
    )


def append(k: Tensor, v: Tensor, tail_k: Tensor, tail_v: Tensor, tail_at: Tensor) -> None:
    """Write the new tokens [B, Hkv, S, D] into the tail [B, Hkv, T, D] from slot ``tail_at``; slots wrap."""
    length, capacity = k.shape[2], tail_k.shape[2]
    if capacity == 0:
        return
    first = max(0, length - capacity)  # of more tokens than slots only the last stay
    if length == capacity and tail_at.device.type == "cpu" and int(tail_at) == 0:
        tail_k.copy_(k)
        tail_v.copy_(v)
        return
    slots = (tail_at.to(torch.int64) + torch.arange(first, length, device=tail_at.device)) % capacity
    tail_k.index_copy_(2, slots, k[:, :, first:].to(tail_k.dtype))
    tail_v.index_copy_(2, slots, v[:, :, first:].to(tail_v.dtype))


@dataclass(frozen=True)
class Store:
    """Packed entries of one layer: row (b, h) is ``[row_start[b, h], row_start[b, h] + row_len[b, h])``."""

    k: Tensor  # [N, Dk]
    v: Tensor  # [N, Dv]
    log_votes: Tensor  # [N] fp32
    tokens: Tensor  # [N] int32
    pos: Tensor  # [N] int32
    row_start: Tensor  # [B, Hkv] int64
    row_len: Tensor  # [B, Hkv] int32
    ema: Tensor | None = None  # [N, 2] fp32 of :class:`Predicted` entries

    def tensors(self) -> dict[str, Tensor]:
        """What it holds, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    @staticmethod
    def empty(batch: int, kv_heads: int, key_dim: int, value_dim: int, like: Tensor) -> Store:
        """A store without entries, in the dtype and on the device of ``like``."""
        zeros = torch.zeros(batch, kv_heads, dtype=torch.int64, device=like.device)
        return Store(
            k=like.new_empty(0, key_dim),
            v=like.new_empty(0, value_dim),
            log_votes=torch.empty(0, dtype=torch.float32, device=like.device),
            tokens=torch.empty(0, dtype=torch.int32, device=like.device),
            pos=torch.empty(0, dtype=torch.int32, device=like.device),
            row_start=zeros,
            row_len=zeros.to(torch.int32),
        )


def pack(entries: Entries) -> Store:
    """Entries without their unused slots, row after row."""
    used = entries.valid
    row_len = used.sum(-1)
    ends = row_len.flatten().cumsum(0)
    return Store(
        k=entries.k[used],
        v=entries.v[used],
        log_votes=entries.log_votes[used],
        tokens=entries.tokens[used],
        pos=entries.pos[used],
        row_start=(ends - row_len.flatten()).view_as(row_len),
        row_len=row_len.to(torch.int32),
        ema=entries.ema[used] if isinstance(entries, Predicted) else None,
    )


def unpack(store: Store) -> Entries:
    """The store padded to its longest row. An equal-length store laid out in row order is a view, not a copy."""
    entries, index = _padded(store)
    if store.ema is None:
        return entries
    ema = store.ema.view(*entries.pos.shape, 2) if index is None else store.ema[index]
    return Predicted(**vars(entries), ema=ema)


def _padded(store: Store) -> tuple[Entries, Tensor | None]:
    """And which of the store's entries each slot shows; None where all lie in a view."""
    batch, kv_heads = store.row_len.shape
    longest = int(store.row_len.max()) if store.row_len.numel() else 0
    start, length = store.row_start.unsqueeze(-1), store.row_len.unsqueeze(-1).long()
    step = torch.arange(longest, device=store.k.device)
    shape = (batch, kv_heads, longest)
    if store.k.shape[0] == batch * kv_heads * longest and bool(
        (store.row_start.flatten() == longest * torch.arange(batch * kv_heads, device=store.k.device)).all()
    ):
        entries = Entries(
            k=store.k.view(*shape, -1) if longest else store.k.new_empty(*shape, store.k.shape[-1]),
            v=store.v.view(*shape, -1) if longest else store.v.new_empty(*shape, store.v.shape[-1]),
            log_votes=store.log_votes.view(shape),
            tokens=store.tokens.view(shape),
            pos=store.pos.view(shape),
        )
        return entries, None
    used = step < length
    index = (start + step).where(used, start.clamp(max=max(0, store.k.shape[0] - 1)))
    entries = Entries(
        k=store.k[index],
        v=store.v[index],
        log_votes=store.log_votes[index].masked_fill(~used, -torch.inf),
        tokens=store.tokens[index].masked_fill(~used, 0),
        pos=store.pos[index].masked_fill(~used, -1),
    )
    return entries, index
