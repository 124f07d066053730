"""The CPU attention kernel against a plain fp64 statement of what it means."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kvpass.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_not()))

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Case:
    """Arguments of one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_pos: Tensor
    store_k: Tensor
    store_v: Tensor
    log_votes: Tensor
    row_start: Tensor
    row_len: Tensor
    tail_k: Tensor
    tail_v: Tensor
    tail_pos: Tensor
    tail_at: Tensor
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    chunk: int = 0
    writes: bool = True

    def run(self, **options) -> Tensor:
        """Calls the kernel on copies of the tail."""
        return self.run_and_append(**options)[0]

    def run_and_append(self, **options) -> tuple[Tensor, Tensor, Tensor]:
        """The output and the tail after the call."""
        arguments = dict(vars(self), tail_k=self.tail_k.clone(), tail_v=self.tail_v.clone())
        out = cpu.attend(*arguments.values(), **options)
        return out, arguments["tail_k"], arguments["tail_v"]


def make(
    batch=2, kv_heads=2, group=3, tokens=1, key_dim=64, value_dim=None, lengths=(70, 1, 600, 33),
    slots=40, used=17, model=torch.float32, storage=torch.float32, seed=0, **options,
) -> Case:  # fmt: skip
    """A random case: rows of the given lengths with poisoned gaps, a tail whose unused slots are poisoned."""
    g = torch.Generator().manual_seed(seed)
    value_dim = value_dim or key_dim

    def normal(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=g).to(dtype)

    gap = 5
    starts, at = [], gap
    for n in lengths:
        starts.append(at)
        at += n + gap
    store_k, store_v = normal(at, key_dim, dtype=storage), normal(at, value_dim, dtype=storage)
    log_votes = torch.rand(at, generator=g) * 3
    live = torch.zeros(at, dtype=torch.bool)
    for start, n in zip(starts, lengths, strict=True):
        live[start : start + n] = True
    tail_k = normal(batch, kv_heads, slots, key_dim, dtype=storage)
    tail_v = normal(batch, kv_heads, slots, value_dim, dtype=storage)
    first = 1000  # position of the first tail token
    tail_pos = torch.full((batch, slots), -1, dtype=torch.int32)
    tail_pos[:, :used] = torch.arange(first, first + used, dtype=torch.int32)
    for poisoned, gone in ((store_k, ~live), (store_v, ~live), (log_votes, ~live)):
        poisoned[gone] = math.nan
    tail_k[:, :, used:], tail_v[:, :, used:] = math.nan, math.nan
    return Case(
        q=normal(batch, tokens, kv_heads * group, key_dim, dtype=model).transpose(1, 2),
        k=normal(batch, tokens, kv_heads, key_dim, dtype=model).transpose(1, 2),
        v=normal(batch, tokens, kv_heads, value_dim, dtype=model).transpose(1, 2),
        q_pos=torch.arange(first + used, first + used + tokens, dtype=torch.int32).repeat(batch, 1),
        store_k=store_k,
        store_v=store_v,
        log_votes=log_votes,
        row_start=torch.tensor(starts).view(batch, kv_heads),
        row_len=torch.tensor(lengths, dtype=torch.int32).view(batch, kv_heads),
        tail_k=tail_k,
        tail_v=tail_v,
        tail_pos=tail_pos,
        tail_at=torch.tensor([used % max(slots, 1)]),
        scale=key_dim**-0.5,
        **options,
    )


def oracle(c: Case) -> Tensor:
    """The operator in fp64, one head at a time; hidden slots are left out, not masked: they may be NaN."""
    batch, heads, tokens, _ = c.q.shape
    group = heads // c.k.shape[1]
    out = torch.zeros(batch, heads, tokens, c.v.shape[-1], dtype=torch.float64)
    for b in range(batch):
        here = c.q_pos[b].unsqueeze(1)
        pos = torch.cat([c.tail_pos[b], c.q_pos[b]]).unsqueeze(0)
        seen = (pos >= 0) & (pos <= here) & ((pos > here - c.window) if c.window else True)
        seen &= (pos // c.chunk == here // c.chunk) if c.chunk else True  # [S, T + S]
        some = seen.any(0)
        for head in range(heads):
            h = head // group
            row = slice(int(c.row_start[b, h]), int(c.row_start[b, h] + c.row_len[b, h]))
            keys = torch.cat([c.store_k[row].double(), torch.cat([c.tail_k[b, h].double(), c.k[b, h].double()])[some]])
            values = torch.cat(
                [c.store_v[row].double(), torch.cat([c.tail_v[b, h].double(), c.v[b, h].double()])[some]]
            )
            logits = c.scale * c.q[b, head].double() @ keys.T
            if c.softcap:
                logits = c.softcap * torch.tanh(logits / c.softcap)
            n = row.stop - row.start
            logits[:, :n] += c.log_votes[row].double()
            logits[:, n:].masked_fill_(~seen[:, some], -math.inf)
            useful = (logits > -math.inf).any(1) & (c.q_pos[b] >= 0)
            if c.sinks is not None:
                logits = torch.cat([logits, c.sinks[head].double().expand(tokens, 1)], 1)
                values = torch.cat([values, torch.zeros(1, values.shape[1], dtype=torch.float64)])
            out[b, head, useful] = torch.softmax(logits[useful], 1) @ values
    return out


def check(case: Case, **options) -> None:
    """The kernel agrees with the oracle."""
    out = case.run(**options)
    assert out.dtype == case.q.dtype and out.transpose(1, 2).is_contiguous()
    tolerance = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(out.double(), oracle(case), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16, 71])
def test_group_sizes(group):
    """Any number of query heads may share a KV head."""
    check(make(group=group))


@pytest.mark.parametrize("dim", [(32, 32), (64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (256, 256)])
def test_head_dims(dim):
    """Every head dimension of common models is served."""
    check(make(key_dim=dim[0], value_dim=dim[1], tokens=2))


@pytest.mark.parametrize("dim", [(192, 128), (64, 72), (8, 120), (40, 24), (13, 7), (1, 1), (65, 255)])
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, torch.float16])
def test_odd_dims(dim, storage):
    """Keys and values may differ in width, and need not fill a register; nothing is read past a row."""
    case = make(key_dim=dim[0], value_dim=dim[1], storage=storage, lengths=(70, 5, 3, 1))
    end = int(case.row_start[-1, -1] + case.row_len[-1, -1])
    check(replace(case, store_k=case.store_k[:end].clone(), store_v=case.store_v[:end].clone()))


@pytest.mark.parametrize("model", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, torch.float16])
def test_types(model, storage):
    """Model and storage types are independent; arithmetic is fp32 on the stored values."""
    case = make(model=model, storage=storage, tokens=3)
    check(case)
    _, tail_k, tail_v = case.run_and_append()
    for tail, new in ((tail_k, case.k), (tail_v, case.v)):
        assert torch.equal(tail[:, :, 17:20], new.to(storage))


def test_tail_type_differs_from_store():
    """The tail may keep another type than the store."""
    case = make(storage=torch.bfloat16)
    check(replace(case, tail_k=case.tail_k.float(), tail_v=case.tail_v.float()))


@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 45])
@pytest.mark.parametrize("window", [0, 1, 7, 1000])
def test_tokens_and_windows(tokens, window):
    """Causality and the window bind tail and new tokens; the store is always visible."""
    check(make(tokens=tokens, window=window, slots=80))


@pytest.mark.parametrize("tokens", [1, 5, 45])
@pytest.mark.parametrize("chunk", [1, 6, 1017])
def test_chunks(tokens, chunk):
    """A query sees its own chunk only; another attention's tail is not written."""
    case = make(tokens=tokens, window=chunk, chunk=chunk, slots=80, writes=False)
    check(case)
    _, tail_k, _ = case.run_and_append()
    assert torch.equal(tail_k.nan_to_num(), case.tail_k.nan_to_num())


def test_many_queries():
    """A long call, served in several passes, is right."""
    check(make(tokens=150, group=8, slots=160, batch=1, lengths=(700, 3)))


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_softcap_and_sinks(softcap, sinks):
    """The cap bounds the dot product before the vote is added; a sink takes weight and gives no value."""
    case = make(tokens=2, softcap=softcap)
    check(replace(case, scale=1.0, sinks=torch.randn(6) * 3 if sinks else None))


@pytest.mark.parametrize("tile", [1, 16, 63, 64, 100, 512, 4096])
def test_tiles_agree(tile):
    """Cutting rows into tiles changes nothing beyond rounding."""
    check(make(tokens=2, lengths=(70, 0, 1500, 513)), tile=tile)


@pytest.mark.parametrize("lengths", [(0, 0, 0, 0), (0, 1, 64, 65), (1, 1, 1, 1), (511, 512, 513, 0)])
def test_row_lengths(lengths):
    """Empty rows, single entries and rows around a tile's edge are served."""
    check(make(lengths=lengths))
    check(make(lengths=lengths, used=0))


def test_nothing_visible_gives_zeros():
    """A query that sees no key gives zeros, with or without a sink, not NaN."""
    case = make(lengths=(0, 70, 3, 600), tokens=2)
    case.log_votes.fill_(-math.inf)
    blind = replace(case, tail_pos=torch.full_like(case.tail_pos, -1))
    for c in (blind, replace(blind, sinks=torch.ones(6))):
        dead = replace(c, q_pos=torch.full_like(c.q_pos, -1))
        assert torch.equal(dead.run(), torch.zeros_like(dead.run()))
        check(c)


def test_dead_entries():
    """An entry with log-vote -inf counts for nothing, even when a whole tile of them is dead."""
    case = make(lengths=(1200, 1, 600, 33))
    start = int(case.row_start[0, 0])
    case.log_votes[start + 100 : start + 900] = -math.inf
    check(case, tile=128)
    case.log_votes[:] = -math.inf
    check(case)


def test_integer_votes_equal_repeated_entries():
    """An entry with n votes is n entries with one."""
    case = make(batch=1, kv_heads=1, lengths=(50,))
    start = int(case.row_start)
    votes = torch.arange(50) % 4 + 1
    case.log_votes[start : start + 50] = votes.log()
    row = slice(start, start + 50)
    repeated = replace(
        case,
        store_k=case.store_k[row].repeat_interleave(votes, 0),
        store_v=case.store_v[row].repeat_interleave(votes, 0),
        log_votes=torch.zeros(int(votes.sum())),
        row_start=torch.zeros(1, 1, dtype=torch.int64),
        row_len=votes.sum().int().view(1, 1),
    )
    torch.testing.assert_close(case.run(), repeated.run(), rtol=1e-5, atol=1e-5)


def test_order_of_entries_is_free():
    """Permuting the entries of a row changes nothing beyond rounding."""
    case = make()
    moved = replace(case, store_k=case.store_k.clone(), store_v=case.store_v.clone(), log_votes=case.log_votes.clone())
    start, n = int(case.row_start[1, 0]), int(case.row_len[1, 0])
    order = start + torch.randperm(n)
    for name in ("store_k", "store_v", "log_votes"):
        getattr(moved, name)[start : start + n] = getattr(case, name)[order]
    torch.testing.assert_close(moved.run(), case.run(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e4])
def test_poison_is_not_read(poison):
    """What lies in gaps, unused slots, padding tokens and scratch memory never reaches the output."""
    case = make(tokens=3)
    case.q_pos[0, 0] = -1
    clean = case.run()
    dirty_scratch = make(tokens=16, group=8, slots=100, lengths=(900, 900, 900, 900))
    for t in (
        dirty_scratch.q,
        dirty_scratch.k,
        dirty_scratch.v,
        dirty_scratch.store_k,
        dirty_scratch.store_v,
    ):
        t.fill_(poison)
    dirty_scratch.run()
    gone = case.store_k[:, 0].isnan()
    case.store_k[gone], case.store_v[gone], case.log_votes[gone] = poison, poison, poison
    case.tail_k[:, :, 17:], case.tail_v[:, :, 17:] = poison, poison
    for t in (case.q, case.k, case.v):
        t[0, :, 0] = poison
    assert torch.equal(case.run(), clean)


@pytest.mark.parametrize("tokens", [1, 5, 8, 20])
def test_ring(tokens):
    """A ring serves every query from what it held before the call, then keeps the last new tokens."""
    slots, window = 8, 8
    case = make(tokens=tokens, slots=slots, used=slots, window=window)
    positions = torch.arange(1003, 1003 + slots, dtype=torch.int32)  # slot of position p: (p - 1003 + 3) mod 8
    case.tail_pos[:] = positions.roll(3)
    case.q_pos[:] = torch.arange(1011, 1011 + tokens, dtype=torch.int32)
    case = replace(case, tail_at=torch.tensor([3]))
    check(case)
    _, tail_k, tail_v = case.run_and_append()
    want_k, want_v = case.tail_k.clone(), case.tail_v.clone()
    for i in range(tokens):
        want_k[:, :, (3 + i) % slots], want_v[:, :, (3 + i) % slots] = case.k[:, :, i], case.v[:, :, i]
    assert torch.equal(tail_k, want_k) and torch.equal(tail_v, want_v)


def test_no_tail():
    """A tail without slots is allowed: the new tokens are attended and not kept."""
    check(make(slots=0, used=0))


def test_scattered_tail():
    """Unused tail slots may lie between used ones, at other places in each sequence."""
    case = make(tokens=4, slots=30, used=30)
    hole = torch.rand(2, 30) < 0.5
    case.tail_pos[hole] = -1
    case.tail_k.transpose(1, 2)[hole], case.tail_v.transpose(1, 2)[hole] = math.nan, math.nan
    check(case)


def test_shared_rows():
    """Rows of different sequences may name the same entries, wholly or in part."""
    case = make()
    case.row_start[1] = case.row_start[0]
    case.row_len[1] = case.row_len[0] - torch.tensor([3, 1], dtype=torch.int32)
    check(case)


def test_padding_queries():
    """Padding tokens give zeros and are seen by nobody."""
    case = make(tokens=5)
    case.q_pos[0, :2] = -1
    case.q_pos[1, 3:] = -1
    out = case.run()
    assert not out[0, :, :2].any() and not out[1, :, 3:].any()
    check(case)


def test_strides():
    """Queries, new tokens and the tail may be views of larger tensors."""
    case = make(tokens=2)
    wide = torch.randn(2, 2, 10, 64)
    fused = torch.randn(2, 2, 6 * 64 + 2 * 64 + 2 * 64)
    q, k, v = (x.view(2, 2, -1, 64).transpose(1, 2) for x in fused.split([384, 128, 128], -1))
    tail_k = torch.full((2, 2, 90, 64), math.nan)[:, :, 5:45]
    tail_k.copy_(case.tail_k)
    check(replace(case, q=q, k=k, v=v, tail_v=case.tail_v.transpose(1, 2).contiguous().transpose(1, 2)))
    check(replace(case, q=q, k=wide[:, :, 3:5], v=v, tail_k=tail_k))


def test_repeatable():
    """The bits do not depend on the run or the number of threads."""
    case = make(lengths=(3000, 1, 700, 40), tokens=2, storage=torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        first = case.run()
        assert all(torch.equal(case.run(), first) for _ in range(50))
        torch.set_num_threads(1)
        assert torch.equal(case.run(), first)
    finally:
        torch.set_num_threads(threads)


def test_large_logits():
    """Large logits neither overflow nor drown the rest of the row."""
    case = make(lengths=(600, 600, 600, 600))
    check(replace(case, scale=20.0))
    case.log_votes[:] += 80.0
    check(case)


def test_decode_by_steps_equals_one_call():
    """Feeding tokens one by one gives what one call with all of them gives."""
    case = make(tokens=6, slots=40)
    whole, tail_k, _ = case.run_and_append()
    step = replace(case, tail_k=case.tail_k.clone(), tail_v=case.tail_v.clone(), tail_pos=case.tail_pos.clone())
    for i in range(6):
        one = slice(i, i + 1)
        at = torch.tensor([17 + i])
        now = replace(
            step,
            q=case.q[:, :, one],
            k=case.k[:, :, one],
            v=case.v[:, :, one],
            q_pos=case.q_pos[:, one],
            tail_at=at,
        )
        out = cpu.attend(*vars(now).values())
        torch.testing.assert_close(out, whole[:, :, one], rtol=1e-5, atol=1e-5)
        step.tail_pos[:, 17 + i] = case.q_pos[:, i]
    torch.testing.assert_close(step.tail_k, tail_k, equal_nan=True)


def test_support():
    """The predicate refuses what the kernel cannot take."""
    c = make()
    tensors = [c.q, c.k, c.v, c.store_k, c.store_v, c.log_votes, c.tail_k, c.tail_v]
    assert cpu.supports_attend(*tensors)
    for i, bad in [
        (0, c.q.double()),
        (0, c.q[:, :5]),
        (3, c.store_k.half()),
        (5, c.log_votes.double()),
        (6, c.tail_k.transpose(2, 3)),
        (0, c.q.clone().requires_grad_()),
        (0, c.q.to("meta")),
    ]:
        assert not cpu.supports_attend(*tensors[:i], bad, *tensors[i + 1 :])
