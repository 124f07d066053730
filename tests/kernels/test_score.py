"""Attention mass against plain loops."""

import math

import pytest
import torch

from kvpass.kernels import score as score_module
from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.score import (
    attention_blocks,
    attention_mass,
    attention_rms,
    compact,
    exp_,
    one_head_each,
    recent_queries,
)


def example(dtype=torch.float64, batch=2, kv_heads=2, group=3, slots=11, width=5, dim=4, seed=0):
    """Entries with votes, an unused slot and a shorter sequence, and queries with an unused slot."""
    g = torch.Generator().manual_seed(seed)
    pos = torch.arange(slots, dtype=torch.int32).expand(batch, kv_heads, slots).contiguous()
    tokens = torch.randint(1, 4, (batch, kv_heads, slots), generator=g, dtype=torch.int32)
    tokens[1, :, 8:] = 0
    tokens[0, 1, 10:] = 0
    unused = tokens == 0
    entries = Entries(
        k=torch.randn(batch, kv_heads, slots, dim, generator=g, dtype=dtype),
        v=torch.randn(batch, kv_heads, slots, dim, generator=g, dtype=dtype),
        log_votes=tokens.float().log(),
        tokens=tokens,
        pos=pos.masked_fill(unused, -1),
    )
    q_pos = torch.stack([torch.arange(slots - width, slots), torch.arange(8 - width, 8)]).int()
    q_pos[1, 0] = -1
    q = torch.randn(batch, kv_heads * group, width, dim, generator=g, dtype=dtype)
    return entries, Observation(q, q_pos, 0.7)


def softmax_rows(entries, seen, causal):
    """weight[b][kv head][query head of the group][query][entry], one scalar at a time."""
    batch, kv_heads, slots, _ = entries.k.shape
    group = seen.q.shape[1] // kv_heads
    weight = torch.zeros(batch, kv_heads, group, seen.q.shape[2], slots, dtype=torch.float64)
    for b in range(batch):
        for h in range(kv_heads):
            for g in range(group):
                for w in range(seen.q.shape[2]):
                    at = int(seen.q_pos[b, w])
                    if at < 0:
                        continue
                    mass = {}
                    for n in range(slots):
                        if entries.tokens[b, h, n] and (not causal or entries.pos[b, h, n] <= at):
                            dot = sum((seen.q[b, h * group + g, w] * entries.k[b, h, n]).tolist())
                            mass[n] = math.exp(seen.scale * dot + float(entries.log_votes[b, h, n]))
                    for n, m in mass.items():
                        weight[b, h, g, w, n] = m / sum(mass.values())
    return weight


@pytest.mark.parametrize("block", [1, 40, 1 << 20])
@pytest.mark.parametrize("causal", [True, False])
def test_mass_and_rms(monkeypatch, causal, block):
    """Mass per head, its sum over the group and the RMS equal plain loops, whatever the block size."""
    monkeypatch.setattr(score_module, "BLOCK", block)
    entries, seen = example()
    weight = softmax_rows(entries, seen, causal)
    per_head = attention_mass(entries, seen, causal=causal, per_head=True)
    torch.testing.assert_close(per_head, weight.sum(3), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(attention_mass(entries, seen, causal=causal), weight.sum((2, 3)), rtol=1e-12, atol=1e-14)
    used = (seen.q_pos >= 0).sum(-1)[:, None, None] * 3
    rms = (weight.square().sum((2, 3)) / used).sqrt()
    torch.testing.assert_close(attention_rms(entries, seen, causal=causal), rms, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_runs_in_fp32(dtype):
    """Storage dtypes below fp64 are judged in fp32."""
    entries, seen = example(dtype)
    mass = attention_mass(entries, seen)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass.double(), softmax_rows(entries, seen, True).sum((2, 3)), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("shift", [-200.0, 200.0])
def test_logit_shift(shift):
    """A constant added to every logit changes nothing and overflows nowhere."""
    entries, seen = example(torch.float32)
    moved = Entries(entries.k, entries.v, entries.log_votes + shift, entries.tokens, entries.pos)
    torch.testing.assert_close(attention_mass(moved, seen), attention_mass(entries, seen), rtol=1e-3, atol=1e-5)


def test_no_query_no_mass():
    """Without queries every entry has mass 0."""
    entries, seen = example()
    empty = Observation(seen.q[:, :, :0], seen.q_pos[:, :0], seen.scale)
    assert attention_mass(entries, empty).eq(0).all() and attention_rms(entries, empty).eq(0).all()


def test_recent_queries():
    """The last positions of each sequence, wherever its unused slots stand."""
    q = torch.arange(10.0).reshape(2, 1, 5, 1)
    seen = Observation(q, torch.tensor([[0, 3, 6, 8, 9], [-1, -1, 0, 2, 3]], dtype=torch.int32), 1.0)
    recent = recent_queries(seen, 3)
    assert recent.q_pos.tolist() == [[-1, 8, 9], [-1, 2, 3]]
    assert recent.q[:, 0, :, 0].tolist()[0][1:] == [3, 4] and recent.q[1, 0, 1:, 0].tolist() == [8, 9]


def test_compact():
    """Set positions come first and in order."""
    index, used = compact(torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.bool))
    assert index[used].tolist() == [1, 2, 0] and used.tolist() == [[True, True], [True, False]]
    index, used = compact(torch.zeros(2, 4, dtype=torch.bool))
    assert index.shape == used.shape == (2, 0)


def test_one_head_each():
    """A sequence's used queries take the heads of each group in turn, wherever its unused slots stand."""
    q = torch.arange(2 * 6 * 7).reshape(2, 6, 7, 1).float()
    q_pos = torch.tensor([[3, 5, 6, 7, 8, 9, 10], [-1, 0, 2, -1, 4, 5, -1]], dtype=torch.int32)
    one = one_head_each(Observation(q, q_pos, 0.5), 2)
    assert one.q.shape == (2, 2, 16, 1) and one.scale == 0.5
    assert torch.equal(one.q_pos[:, :7], q_pos) and (one.q_pos[:, 7:] == -1).all()
    for b in range(2):
        for h in range(2):
            turn = 0
            for w in range(7):
                if q_pos[b, w] >= 0:
                    assert one.q[b, h, w] == q[b, h * 3 + turn % 3, w]
                    turn += 1


def test_given_blocks():
    """Attention that is already there gives the same score."""
    entries, seen = example()
    blocks = list(attention_blocks(entries, seen, causal=False))
    assert torch.equal(attention_rms(entries, seen, blocks=blocks), attention_rms(entries, seen))


def test_exponentials_never_square_to_subnormals():
    """In fp32 an exponential is normal and so is its square, or it is 0; fp64 keeps all of them."""
    x = -torch.arange(0.0, 120.0, 0.5)
    small = exp_(x.clone())
    assert ((small == 0) | (small.square() >= torch.finfo(torch.float32).tiny)).all()
    torch.testing.assert_close(small, x.exp(), rtol=1e-6, atol=1e-17)
    assert torch.equal(exp_(x.double()), x.double().exp())
