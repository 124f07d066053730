"""Passes over attention weights in C++ against torch's own."""

import pytest
import torch

from kvpass.kernels import cpu
from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.group import nearest
from kvpass.kernels.score import LANES, attention_blocks, attention_rms, last_mass

if not cpu.available():
    pytest.skip(f"no C++ kernels: {cpu.why_not()}", allow_module_level=True)


def example(slots, batch=2, kv_heads=2, width=2 * LANES, dim=8, seed=0):
    """fp32 entries, the second sequence half as long, and queries of which some are unused or see nothing."""
    g = torch.Generator().manual_seed(seed)
    pos = torch.arange(slots, dtype=torch.int32).expand(batch, kv_heads, slots).clone()
    pos[1, :, slots // 2 :] = -1
    tokens = (pos >= 0).int()
    k, v = torch.randn(2, batch, kv_heads, slots, dim, generator=g)
    entries = Entries(k, v, tokens.float().log(), tokens, pos)
    q = 6 * torch.randn(batch, kv_heads, width, dim, generator=g)
    q_pos = torch.randint(-1, slots, (batch, width), generator=g, dtype=torch.int32)
    return entries, Observation(q, q_pos, 0.7)


@pytest.fixture
def by_torch(monkeypatch):
    """``by_torch(function)`` calls it without the C++ passes."""

    def call(function):
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "supports_weights", lambda *_: False)
            return function()

    return call


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("slots", [1, 3, 1024, 2500])
def test_softmax(slots, causal, by_torch):
    """Exponentials, sums and logs of denominators are torch's, for queries that see nothing as well."""
    entries, seen = example(slots)

    def blocks():
        return [(b.mass, b.total, b.log_z) for b in attention_blocks(entries, seen, causal=causal)]

    for own, torchs in zip(blocks(), by_torch(blocks), strict=True):
        # fp32 exponentials differ in the last bits; sums of a few thousand of them by a few more
        torch.testing.assert_close(own, torchs, rtol=1e-5, atol=1e-6)


def test_weights_from_the_same_blocks(by_torch):
    """Root mean squares and the mass of the last queries are torch's."""
    entries, seen = example(1500)

    def figures():
        blocks = list(attention_blocks(entries, seen, causal=False))
        return attention_rms(entries, seen, blocks=blocks), last_mass(entries, seen, blocks, last=500)

    torch.testing.assert_close(figures(), by_torch(figures), rtol=1e-5, atol=1e-6)


def test_mass_of_the_last_queries():
    """Only queries of the last positions of each sequence count, each by its softmax."""
    entries, seen = example(40)
    blocks = list(attention_blocks(entries, seen, causal=False))
    mass = last_mass(entries, seen, blocks, last=10)
    for b in range(2):
        used = (seen.q_pos[b] >= 0) & (seen.q_pos[b] > seen.q_pos[b].max() - 10)
        logits = seen.scale * seen.q[b][:, used] @ entries.k[b].transpose(1, 2)
        expected = (logits + entries.log_votes[b].unsqueeze(1)).softmax(-1).sum(1)
        torch.testing.assert_close(mass[b], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("targets", [1, 5, LANES, 3 * LANES + 2])
def test_nearest(targets, by_torch):
    """The most similar target, the earlier of two that are equal, and none that is barred."""
    entries, _ = example(200)
    entries.k[0, 0, 1] = entries.k[0, 0, 0]  # two equal targets
    index = torch.arange(targets).expand(2, 2, targets)
    used = torch.ones(2, 2, targets, dtype=torch.bool)
    used[1, 1, targets // 2 :] = targets == 1
    others = torch.arange(100, 200).expand(2, 2, 100)
    own = nearest(entries.k, others, index, used)
    torchs = by_torch(lambda: nearest(entries.k, others, index, used))
    torch.testing.assert_close(own[0], torchs[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(own[1], torchs[1])


def test_threads_do_not_change_a_bit():
    """Parts are cut by size and joined in order."""
    entries, seen = example(5000)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            logits = torch.randn(4, 5000, 32, generator=torch.Generator().manual_seed(0))
            pos = entries.pos.reshape(4, -1)
            q_pos = seen.q_pos.repeat_interleave(2, 0)
            results.append((*cpu.softmax(logits, pos, q_pos), logits))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
