"""KeepKV and unified by predicted attention; the predictions themselves are in tests/kernels/test_predict.py."""

from dataclasses import replace

import pytest
import torch

from kvpass.budget import Budget
from kvpass.kernels.entries import Predicted
from kvpass.kernels.predict import log_mass, predict
from kvpass.policies import KeepKV, SnapKV, Unified
from tests.policies.tiny import HEADS, choose, kept, layers_of

OWN = KeepKV(window=6, sinks=2, references=9, judge="ema", window_share=0.0)
GIVEN = KeepKV(selector=SnapKV(window=6, sinks=2, allocator="layer", floor=1.0), judge="ema")


@pytest.mark.parametrize("policy", [OWN, GIVEN], ids=["own selector", "a given one"])
def test_while_decoding_predictions_choose(policy):
    """Decoding keeps what is predicted to be attended to most; a prompt is judged as without, and begins them."""
    ((entries, seen),) = layers_of(replace(policy, judge="recent"), [30], count=1)
    (prompt,) = policy.compress([(entries, seen)], Budget.parse(20), [30])
    (same,) = replace(policy, judge="recent").compress([(entries, seen)], Budget.parse(20), [30])
    assert isinstance(prompt, Predicted) and torch.equal(prompt.k, same.k) and torch.equal(prompt.pos, same.pos)
    later = replace(seen, decoding=True)
    (out,) = policy.compress([(entries, later)], Budget.parse(14), [30])
    mass = log_mass(predict(entries, later, policy.alpha))
    for h in range(HEADS):
        assert kept(out, 0)[h] == choose(mass[0, h].tolist(), 14, 30, 2, 6)


def test_members_weigh_by_predictions():
    """In a merged key every member has its predicted share, and the entry is predicted to get their sum."""
    policy = KeepKV(window=2, sinks=1, judge="ema", threshold=-1.0, negligible=0.0, value_fit=False, max_votes=99)
    ((entries, seen),) = layers_of(replace(policy, judge="recent"), [12], count=1)
    seen = replace(seen, decoding=True)
    (out,) = policy.compress([(entries, seen)], Budget.parse(4), [12])  # a sink, one entry, the window of two
    mass = log_mass(predict(entries, seen, policy.alpha)).exp()
    for h in range(HEADS):
        (slot,) = (n for n in range(4) if out.tokens[0, h, n] > 1)
        share = mass[0, h, 1:10].double()
        key = (share.unsqueeze(1) * entries.k[0, h, 1:10]).sum(0) / share.sum()
        torch.testing.assert_close(out.k[0, h, slot], key, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(log_mass(out)[0, h, slot].exp().double(), share.sum(), rtol=1e-4, atol=1e-6)


def test_unified_takes_it_too():
    """unified stays in its budget by predictions, and conserves their total where nothing is lost."""
    policy = Unified(window=4, sinks=2, judge="ema", threshold=-1.0, negligible=0.0, max_votes=99)
    ((entries, seen),) = layers_of(replace(policy, judge="recent"), [40], count=1)
    (out,) = policy.compress([(entries, replace(seen, decoding=True))], Budget.parse(15), [40])
    assert int(out.lengths.sum()) == 15 * HEADS
    before = log_mass(predict(entries, seen, policy.alpha)).exp().sum(-1)
    torch.testing.assert_close(log_mass(out).exp().masked_fill(~out.valid, 0).sum(-1), before)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_alpha_is_a_share(alpha):
    """An alpha outside (0, 1) is a ValueError."""
    with pytest.raises(ValueError, match="alpha is a share in"):
        KeepKV(alpha=alpha)
