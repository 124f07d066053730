"""Free ends of a prompt: what is compressed, what is charged, what stays exact."""

import pytest
import torch

from kvpass.budget import Budget
from kvpass.kernels.entries import Entries, Observation
from kvpass.policies import SnapKV
from kvpass.policies.regions import Regions, compress_context, join, split


def layer(lengths, dim=4):
    """(entries, observation of the last three queries) of sequences that end together, padded at the left."""
    longest = max(lengths)
    g = torch.Generator().manual_seed(0)
    pos = torch.arange(longest) - (longest - torch.tensor(lengths)[:, None])
    pos = pos.clamp(min=-1).to(torch.int32)
    tokens = (pos >= 0).to(torch.int32)[:, None].expand(-1, 2, -1)
    k, v = torch.randn(2, len(lengths), 2, longest, dim, generator=g)
    votes = torch.zeros(tokens.shape).masked_fill(tokens == 0, -torch.inf)
    q = torch.randn(len(lengths), 4, 3, dim, generator=g)
    return Entries(k, v, votes, tokens, pos[:, None].expand_as(tokens)), Observation(q, pos[:, -3:], 0.5)


def positions(entries, b, h=0):
    return entries.pos[b, h][entries.valid[b, h]].tolist()


def test_split_and_join():
    """Every entry is in exactly one region, by position in its own sequence, and joining gives the same entries."""
    entries, _ = layer([12, 9])
    parts = split(entries, Regions(prefix=2, question=3), [12, 9])
    assert [positions(part, 0) for part in parts] == [[0, 1], list(range(2, 9)), [9, 10, 11]]
    assert [positions(part, 1) for part in parts] == [[0, 1], list(range(2, 6)), [6, 7, 8]]
    whole = join(*parts)
    for b, n in enumerate((12, 9)):
        assert positions(whole, b) == list(range(n))
        assert torch.equal(whole.k[b][whole.valid[b]], entries.k[b][entries.valid[b]])


def test_ends_are_free_and_exact():
    """The budget is of the context alone; prefix and question are kept whole, bit for bit."""
    inputs = [layer([40, 30]), layer([40, 30])]
    regions, budget = Regions(prefix=5, question=7), Budget.parse(0.25)
    kept = list(compress_context(SnapKV(window=2, sinks=1, pool=3), inputs, budget, [40, 30], regions))
    stored = sum(entries.lengths.sum(-1) for entries in kept)
    free = 2 * 2 * 12
    assert (stored - free).tolist() == budget.total([28, 18], 4)
    for (entries, _), out in zip(inputs, kept, strict=True):
        for b, n in enumerate((40, 30)):
            assert {*range(5), *range(n - 7, n)} <= set(positions(out, b))
            assert torch.equal(out.k[b, 0][out.valid[b, 0]][:5], entries.k[b, 0][entries.valid[b, 0]][:5])


def test_without_regions_nothing_changes():
    """No free ends: what the policy keeps by itself."""
    inputs, policy = [layer([20])], SnapKV(window=2, sinks=1, pool=3)
    (own,) = policy.compress(inputs, Budget.parse(0.5), [20])
    (same,) = compress_context(policy, inputs, Budget.parse(0.5), [20], Regions())
    assert torch.equal(own.pos, same.pos)


def test_refuses():
    """A prompt without anything between its ends is refused, and so is a negative region."""
    with pytest.raises(ValueError, match="no context between a prefix of 5"):
        split(layer([8])[0], Regions(5, 3), [8])
    with pytest.raises(ValueError, match="-1 tokens"):
        Regions(-1)
