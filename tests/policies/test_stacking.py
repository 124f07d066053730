"""Small layers compressed side by side come out as they do one by one."""

import pytest
import torch

from kvpass.budget import Budget
from kvpass.policies import KeepKV, Unified, stacking
from tests.policies.tiny import HEADS, layers_of


@pytest.mark.parametrize("policy", [KeepKV(window=4, sinks=2, references=9), Unified(window=4, sinks=2, references=9)])
@pytest.mark.parametrize("value", [0.1, 0.3, 1.0, 9])
def test_side_by_side(policy, value, monkeypatch):
    """Every entry of every layer and sequence is the same, whether layers are stacked or not."""
    lengths = [23, 9, 40]
    budget = Budget.parse(value)
    layers = layers_of(policy, lengths)
    assert len(stacking.together(layers, framed=False)) == 1 < len(layers)
    stacked = list(policy.compress(layers, budget, lengths))
    monkeypatch.setattr(stacking, "SMALL", 0)
    assert len(stacking.together(layers, framed=False)) == len(layers)
    for together, alone in zip(stacked, policy.compress(layers, budget, lengths), strict=True):
        # products of larger batches may add in another order, which the fp32 log-votes round to
        torch.testing.assert_close(vars(together), vars(alone), rtol=1e-6, atol=1e-6)


def test_layers_that_differ_stay_alone():
    """Layers of another width, or whose turning matters, are not stacked."""
    layers = layers_of(KeepKV(), [23, 9])
    assert len(stacking.together(layers, framed=True)) == len(layers)
    (entries, seen), *others = layers
    narrow = entries.take(torch.arange(5).expand(2, HEADS, 5), entries.valid[..., :5])
    assert len(stacking.together([(narrow, seen), *others], framed=False)) == len(layers)
