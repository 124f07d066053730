"""The cache of a compiled model: packed compressed rows, and a tail of exact tokens appended since.

A row is one (layer, sequence, KV head). The store is never written between two compressions, so beams and forks share
it; everything that changes token by token lies in the tail.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import Cache

from kvpass.full import Full
from kvpass.kernels.layout import Store
from kvpass.passes.spec import KVPassError, LayerSpec

ROLLBACK_SLOTS = 64  # tokens that crop() can take back from a sliding layer while recording
TAIL_SLOTS = 64  # smallest tail; later growth doubles, so appending copies each token a bounded number of times


class CacheError(KVPassError, ValueError):
    """A cache was asked for something it cannot do; it is unchanged."""


@dataclass
class Times:
    """Seconds spent on a cache, by phase."""

    prefill: float = 0.0
    compress: float = 0.0
    decode: float = 0.0
    maintain: float = 0.0  # compression while decoding, refreshing included
    refreshes: int = 0
    decoded: int = 0  # forwards after the last compression
    chunked: bool = False  # the prompt's earlier chunks are counted, its last one is not yet


@dataclass(frozen=True)
class Observed:
    """What a policy asked to see, from one chunk of a prompt."""

    queries: list[Tensor]  # per layer [B, Hq, W, Dk]
    pos: Tensor  # [B, W] int32, -1 = unused
    real: Tensor  # [B] int64, tokens of the chunk
    tokens: tuple[Tensor, ...] = ()  # each sequence's ids [n] int64, where they are rehearsed
    # Of a rehearsal: the keys of its tokens, per layer [B, Hkv, R, Dk], and their positions [B, R].
    keys: list[Tensor] | None = None
    key_pos: Tensor | None = None
    hidden: Sequence[Tensor | None] = ()  # per layer [B, S, E] input of its attention; empty while decoding
    hidden_pos: Tensor | None = None  # [B, S] int32, -1 = padding

    def select(self, indices: Tensor) -> Observed:
        """The queries of the sequences ``indices``, without what only a prompt has."""
        return Observed([query[indices] for query in self.queries], self.pos[indices], self.real[indices])


@dataclass
class Tail:
    """Which token each tail slot holds. All layers with one window share it."""

    window: int  # 0 = full attention: slots are never reused
    pos: Tensor  # [B, T] int32 position of the slot's token, -1 = unused
    cursor: int = 0  # tokens appended so far; the next one goes to slot ``cursor % T``

    @property
    def capacity(self) -> int:
        return self.pos.shape[1]


class RaggedCache(Cache):
    """A ``transformers`` cache with rows of different lengths.

    ``get_seq_length()`` is logical: the columns the model has seen, padding included, which is what ``generate``
    counts with. What is stored is ``entries()`` and ``nbytes()``. Made by a compiled model, and only usable with it.
    """

    def __init__(self, layers: tuple[LayerSpec, ...], owner: object):
        self.specs, self.owner = layers, owner
        self.layers = []  # transformers iterates over it; the rows live below
        self.reset()

    def reset(self) -> None:
        """Forget everything; the object can be used for another prompt."""
        self.columns = 0
        self.seen: Tensor | None = None  # [B] int64 real tokens of each sequence
        self.padded = False
        self.stores: list[Store] = []
        self.tails: dict[int, Tail] = {}
        self.keys: list[Tensor] = []  # per layer [B, Hkv, T, Dk]
        self.values: list[Tensor] = []
        self.spare_slots = 0  # sliding layers: slots beyond the window, for padding inside a turn and for rollback
        self.record_past = False
        self.prompt_end: int | None = None  # columns of the prompt that `generate` works on, while it does
        self.pending: list[Observed] = []  # queries observed in earlier chunks of this prompt
        self.recent: list[Observed] = []  # queries of the last tokens, where decoding compresses
        self.asked: Observed | None = None  # queries from all over the text, where rows are refreshed
        self.full: Full | None = None  # every exact key and value but the tail's, where rows are refreshed
        self.steps = 0  # forwards since the last refresh or prompt
        self.anchor: Observed | None = None  # the queries of the first of them, where a threshold is watched
        self.times = Times()

    # -- what transformers asks -------------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, padding included."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no maximum."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Logical sizes; the compiled graph masks by positions and needs no mask."""
        return self.columns + query_length, 0

    def update(self, *args, **kwargs):
        """Only the compiled graph appends to this cache."""
        raise CacheError("a kvpass cache works with the compiled model that made it, not with another model")

    def __len__(self) -> int:
        return len(self.specs)

    def __repr__(self) -> str:
        if self.seen is None:
            return f"RaggedCache(empty, {len(self.specs)} layers)"
        return (
            f"RaggedCache({len(self.specs)} layers, batch {self.batch_size}, {self.columns} tokens seen, "
            f"{self.entries()} entries, {self.nbytes() / 2**20:.1f} MiB)"
        )

    @property
    def batch_size(self) -> int:
        return -1 if self.seen is None else self.seen.shape[0]

    @property
    def is_initialized(self) -> bool:
        return self.seen is not None

    is_compileable = property(lambda self: False)
    is_croppable = property(lambda self: True)
    is_linear = property(lambda self: [False] * len(self.specs))
    is_dummy = property(lambda self: [False] * len(self.specs))
    is_sliding = property(lambda self: [bool(layer.window) for layer in self.specs])

    def activate_past_recording(self) -> None:
        """Announce that ``crop`` may follow: sliding layers keep some tokens behind their window, and plain calls do
        not compress."""
        if not self.record_past:
            self.record_past = True
            self.spare_slots += ROLLBACK_SLOTS

    def stop_recording(self) -> None:
        """Give up what only ``crop`` needs: sliding layers return to their window."""
        if self.record_past:
            self.record_past = False
            self.spare_slots -= ROLLBACK_SLOTS
            for tail in self.tails.values():
                limit = tail.window + self.spare_slots
                if tail.window and tail.capacity > limit:
                    self._resize(tail, limit)

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        return self.record_past

    # -- size -------------------------------------------------------------------------------------------------------

    def lengths(self) -> list[Tensor]:
        """Per layer [B, Hkv] int64: entries physically kept, store and tail."""
        result = []
        for index, layer in enumerate(self.specs):
            tail = self.tails[layer.window]
            kept = (tail.pos >= 0).sum(-1, keepdim=True)
            result.append(self.stores[index].row_len.long() + kept)
        return result

    def entries(self) -> int:
        """Entries physically kept, over all layers, sequences and KV heads."""
        return sum(int(rows.sum()) for rows in self.lengths()) if self.seen is not None else 0

    def tensors(self) -> list[Tensor]:
        """Every tensor of the cache."""
        held = [tensor for store in self.stores for tensor in store.tensors().values()]
        held += [*self.keys, *self.values, *(tail.pos for tail in self.tails.values())]
        return held + ([self.seen] if self.seen is not None else [])

    def nbytes(self) -> int:
        """Bytes of the storages that the cache holds: metadata and slack included, shared ones counted once."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in self.tensors()}
        return sum(storage.nbytes() for storage in storages.values())

    # -- room -------------------------------------------------------------------------------------------------------

    def prepare(self, batch: int, new: int, exact: bool, like: Tensor) -> None:
        """Make room for ``new`` columns; ``exact`` asks for no slack, as a prompt is packed right after."""
        if self.seen is None:
            self.seen = torch.zeros(batch, dtype=torch.int64, device=like.device)
            for layer in self.specs:
                if layer.window not in self.tails:
                    empty = torch.empty(batch, 0, dtype=torch.int32, device=like.device)
                    self.tails[layer.window] = Tail(layer.window, empty)
                self.stores.append(Store.empty(batch, layer.kv_heads, layer.key_dim, layer.value_dim, like))
                self.keys.append(like.new_empty(batch, layer.kv_heads, 0, layer.key_dim))
                self.values.append(like.new_empty(batch, layer.kv_heads, 0, layer.value_dim))
        for tail in self.tails.values():
            needed = tail.cursor + new
            limit = tail.window + self.spare_slots if tail.window else needed
            if needed <= tail.capacity or (tail.capacity >= limit > 0 and tail.window):
                continue
            slack = needed if exact else max(needed, 2 * tail.capacity, TAIL_SLOTS)
            self._resize(tail, min(slack, limit) if tail.window else slack)

    def _resize(self, tail: Tail, capacity: int) -> None:
        """Give a tail another capacity; a ring is laid out from slot 0 again."""
        held = min(tail.cursor, tail.capacity, capacity)
        order = (tail.cursor - held + torch.arange(held, device=tail.pos.device)) % max(1, tail.capacity)
        pos = tail.pos.new_full((tail.pos.shape[0], capacity), -1)
        pos[:, :held] = tail.pos[:, order]
        for index, layer in enumerate(self.specs):
            if layer.window == tail.window:
                for held_list in (self.keys, self.values):
                    old = held_list[index]
                    grown = old.new_zeros(*old.shape[:2], capacity, old.shape[-1])
                    grown[:, :, :held] = old[:, :, order]
                    held_list[index] = grown
        tail.pos, tail.cursor = pos, held

    def slots(self, tail: Tail, new: int) -> Tensor:
        """[min(new, T)] int64: slots that the last of ``new`` columns go to."""
        first = max(0, new - tail.capacity)
        return (tail.cursor + torch.arange(first, new, device=tail.pos.device)) % tail.capacity

    def commit(self, q_pos: Tensor) -> None:
        """Label the slots that a forward filled with ``q_pos`` [B, S]. Until then the new tokens do not exist."""
        new = q_pos.shape[1]
        for tail in self.tails.values():
            first = max(0, new - tail.capacity)
            if new == 1:
                tail.pos[:, tail.cursor % tail.capacity] = q_pos[:, 0]
            else:
                tail.pos[:, self.slots(tail, new)] = q_pos[:, first:]
            tail.cursor += new
        self.columns += new
        self.seen = self.seen + (q_pos >= 0).sum(-1) if self.padded else self.seen + new

    def replace_stores(self, stores: list[Store | None]) -> None:
        """Take over compressed rows, which hold everything the tail did; layers with ``None`` keep what they have."""
        for index, store in enumerate(stores):
            if store is not None:
                self.stores[index] = store
        full = self.tails.get(0)
        if full is not None and any(store is not None for store in stores):
            full.cursor = 0
            full.pos = full.pos[:, :0]
            for index, layer in enumerate(self.specs):
                if not layer.window:
                    self.keys[index] = self.keys[index].new_empty(*self.keys[index].shape[:2], 0, layer.key_dim)
                    self.values[index] = self.values[index].new_empty(*self.values[index].shape[:2], 0, layer.value_dim)

    # -- sequences --------------------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence b continues what sequence ``beam_idx[b]`` was; the store is shared, not copied."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences ``indices`` [B'] (int64), in that order, repeats allowed."""
        if self.seen is None:
            return
        indices = torch.as_tensor(indices, dtype=torch.int64, device=self.seen.device)
        self.seen = self.seen[indices]
        for tail in self.tails.values():
            tail.pos = tail.pos[indices]
        for index, store in enumerate(self.stores):
            rows = {"row_start": store.row_start[indices], "row_len": store.row_len[indices]}
            self.stores[index] = Store(**{**vars(store), **rows})
            self.keys[index] = self.keys[index][indices]
            self.values[index] = self.values[index][indices]
        self.recent = [part.select(indices) for part in self.recent]
        if self.anchor is not None:
            self.anchor = self.anchor.select(indices)
        if self.asked is not None:
            self.asked = self.asked.select(indices)
        if self.full is not None:
            self.full.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times, next to each other."""
        if self.seen is not None:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` columns (0 is a no-op).

        Raises:
            CacheError: they are already compressed, or a sliding layer has given up what it would need again.
        """
        if tokens_to_remove > 0:
            raise CacheError(
                f"crop takes a negative number of tokens to remove, got {tokens_to_remove}; crop(-n) removes the last n"
            )
        count = -tokens_to_remove
        if not count:
            return
        for tail in self.tails.values():
            if tail.window and count > self.spare_slots and tail.cursor > tail.window:
                raise CacheError(
                    f"cannot crop {count} tokens: a sliding layer keeps only its window of {tail.window}; "
                    "call activate_past_recording() before appending tokens that may be cropped"
                )
            if not tail.window and count > tail.cursor:
                raise CacheError(
                    f"cannot crop {count} tokens: only the last {tail.cursor} are not compressed, and merged or "
                    "dropped entries cannot be taken apart again"
                )
        lost = None
        for tail in self.tails.values():
            tail.pos = tail.pos.clone()
            slots = (tail.cursor - count + torch.arange(count, device=tail.pos.device)) % tail.capacity
            lost = (tail.pos[:, slots] >= 0).sum(-1)
            tail.pos[:, slots] = -1
            tail.cursor -= count
        self.columns -= count
        self.seen = self.seen - lost
        self.recent = self.recent[:-count]

    def fork(self) -> RaggedCache:
        """An independent continuation: the store's memory is shared, the tail is copied."""
        twin = copy.copy(self)
        twin.stores, twin.times, twin.pending = list(self.stores), replace(self.times), list(self.pending)
        twin.recent, twin.asked = list(self.recent), self.asked
        twin.full = None if self.full is None else self.full.fork()
        twin.keys = [key.clone() for key in self.keys]
        twin.values = [value.clone() for value in self.values]
        twin.tails = {window: Tail(window, tail.pos.clone(), tail.cursor) for window, tail in self.tails.items()}
        return twin

    def save(self, path, tokens=None, tokenizer=None) -> None:
        """Write the cache to a safetensors file; ``kvpass.load_cache(path, model)`` reads it.

        With ``tokens`` (ids [B, S], or a list of ids a sequence) and ``tokenizer`` the file holds the text too, which
        ``kvpass view`` shows.
        """
        from kvpass.saved import save

        save(self, path, tokens, tokenizer)

    def __deepcopy__(self, memo) -> RaggedCache:
        return self.fork()
