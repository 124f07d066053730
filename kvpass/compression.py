"""The module behind the prefill program's ``compress`` node: from a full cache to packed rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvpass.budget import Budget
from kvpass.cache import Observed
from kvpass.kernels.entries import Entries, Observation, Predicted
from kvpass.kernels.layout import Store, pack, unpack
from kvpass.kernels.predict import unseen
from kvpass.passes.evaluate import attribute
from kvpass.passes.outputs import per_head
from kvpass.passes.spec import Program
from kvpass.policies.base import Policy


@dataclass(frozen=True)
class Chunk:
    """Where a piece of a prompt stands: what was observed in earlier pieces, and whether more are coming."""

    earlier: tuple[Observed, ...] = ()
    more: bool = False
    rehearse: Callable[[], Observed] | None = None  # runs what the policy rehearses over the full cache


@dataclass(frozen=True)
class Compressed:
    """Packed rows for every full-attention layer (None for the others), what judged them, and the seconds it took."""

    stores: list[Store | None]
    seen: Observed
    seconds: float


class Compress(nn.Module):
    """Compress every full-attention layer to the budget; sliding layers already hold only their window.

    The budget counts the rows of full-attention layers: a fraction is of the tokens seen times those rows.
    """

    def __init__(self, program: Program, policy: Policy, budget: Budget, *, decoding: bool = False):
        super().__init__()
        self.decoding = decoding
        self.layers, self.policy, self.budget = program.layers, policy, budget
        # The model's own parameters, of which policies see views; a tuple, so that they are not registered twice.
        self.weights = tuple(layer.out and attribute(program, layer.out.weight) for layer in program.layers)
        full = [index for index, layer in enumerate(program.layers) if not layer.window]
        for index in full if policy.needs_frames else ():
            if program.layers[index].turns and program.layers[index].frame is None:
                raise ValueError(
                    f"policy {policy.name!r} turns keys back to position 0, which could not be read for "
                    f"{program.layers[index].layer}; explain() says why"
                )
        asked = policy.taps(len(full))
        if any(not 0 <= index < len(full) for index in asked):
            raise ValueError(f"policy {policy.name!r} taps layers {asked} of {len(full)} full-attention layers")
        self.taps = tuple(full[index] for index in asked)

    def extra_repr(self) -> str:
        return f"{self.policy}, {self.budget}"

    @torch.no_grad()
    def forward(
        self,
        observed: list[Tensor],  # per layer [B, Hq, W, Dk]
        columns: Tensor,  # [B, W] int64 column of each observed query in this call, -1 = unused
        q_pos: Tensor,  # [B, S] int32
        tails: list[list[Tensor]],  # per window: positions [B, T] before this call, first slot [1]
        state: list[list[Tensor]],  # per layer: store_k .. row_len, tail_k, tail_v, store_tokens, store_pos
        chunk: Chunk,
        hidden: list[Tensor | None],  # per layer [B, S, E] where tapped
    ) -> Compressed | Observed:
        """The compressed rows, or only the observed queries when more of the prompt is coming."""
        started = time.perf_counter()
        positions = q_pos.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, -1)
        now = Observed(observed, positions, (q_pos >= 0).sum(-1), hidden=hidden, hidden_pos=q_pos)
        if chunk.more:
            return now
        windows = list(dict.fromkeys(layer.window for layer in self.layers))
        labels = torch.zeros_like(q_pos[:, :0])
        if 0 in windows:
            tail_pos, at = tails[windows.index(0)]
            labels = tail_pos.clone()
            labels[:, int(at) : int(at) + q_pos.shape[1]] = q_pos
        seen = joined([*chunk.earlier, now])
        if chunk.rehearse is not None and 0 in windows:
            seen = joined([seen, chunk.rehearse()])
        stores = self.pack_rows(state, labels, seen)
        return Compressed(stores, seen, time.perf_counter() - started)

    @torch.no_grad()
    def pack_rows(self, state: list[list[Tensor]], tail_pos: Tensor, seen: Observed) -> list[Store | None]:
        """Compress store and tail of every full-attention layer; ``tail_pos`` [B, T] labels the tail's slots."""
        stores: list[Store | None] = [None] * len(self.layers)
        chosen = [index for index, layer in enumerate(self.layers) if not layer.window]
        if not chosen:
            return stores
        inputs = [(_entries(state[index], tail_pos), self._observation(index, seen)) for index in chosen]
        lengths = (tail_pos.amax(-1).long() + 1).tolist()
        for index, kept in zip(chosen, self.policy.compress(inputs, self.budget, lengths), strict=True):
            stores[index] = pack(kept)
        return stores

    def _observation(self, index: int, seen: Observed) -> Observation:
        layer, weight = self.layers[index], self.weights[index]
        hidden = seen.hidden[index] if seen.hidden else None
        return Observation(
            q=seen.queries[index],
            q_pos=seen.pos,
            scale=layer.scale,
            frame=layer.frame,
            out=None if weight is None else per_head(layer.out, weight, layer.heads),
            hidden=hidden,
            hidden_pos=None if hidden is None else seen.hidden_pos,
            turns=layer.turns,
            own_k=None if seen.keys is None else seen.keys[index],
            own_pos=seen.key_pos,
            decoding=self.decoding,
        )


def joined(parts: list[Observed]) -> Observed:
    """Observations of consecutive pieces as one."""
    if len(parts) == 1:
        return parts[0]
    queries = [torch.cat(layer, 2) for layer in zip(*(part.queries for part in parts), strict=True)]
    real = torch.stack([part.real for part in parts]).sum(0)
    tapped = [part for part in parts if part.hidden]  # a rehearsal shows none
    hidden = [
        None if layer[0] is None else torch.cat(layer, 1)
        for layer in zip(*(part.hidden for part in tapped), strict=True)
    ]
    last = parts[-1]
    return Observed(
        queries,
        torch.cat([part.pos for part in parts], 1),
        real,
        keys=last.keys,
        key_pos=last.key_pos,
        hidden=hidden,
        hidden_pos=torch.cat([part.hidden_pos for part in tapped], 1) if tapped else None,
    )


def _entries(fields: list[Tensor], positions: Tensor) -> Entries:
    store_k, store_v, log_votes, row_start, row_len, tail_k, tail_v, tokens, pos, *kept = fields
    ema = kept[0] if kept else None  # a prompt begins predictions anew
    batch, kv_heads = row_len.shape
    exact = positions >= 0
    shape = (batch, kv_heads, positions.shape[1])
    tail = Entries(
        k=tail_k,
        v=tail_v,
        log_votes=torch.zeros(exact.shape, device=exact.device).masked_fill(~exact, -torch.inf)[:, None].expand(shape),
        tokens=exact.to(torch.int32)[:, None].expand(shape),
        pos=positions[:, None].expand(shape),
    )
    if store_k.shape[0] == 0:
        return tail
    stored = unpack(Store(store_k, store_v, log_votes, tokens, pos, row_start, row_len, ema))
    if ema is not None:
        tail = Predicted(**vars(tail), ema=unseen(tail))
    return type(tail)(*(torch.cat([getattr(stored, name), getattr(tail, name)], 2) for name in vars(tail)))
