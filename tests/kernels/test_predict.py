"""Predicted attention, against a plain loop over single steps."""

from dataclasses import replace

import pytest
import torch

from kvpass.kernels.entries import Entries, Observation, Predicted
from kvpass.kernels.group import Groups
from kvpass.kernels.layout import pack, unpack
from kvpass.kernels.predict import log_mass, merged, predict, since, unseen

HEADS, GROUP, DIM, SCALE, ALPHA = 2, 2, 8, 0.35, 0.8


def made(slots=24, steps=10, batch=2, seed=0, scale=1.5):
    """Entries at positions 0..slots, some with votes, and the queries of the last ``steps`` of them."""
    g = torch.Generator().manual_seed(seed)
    shape = (batch, HEADS, slots)
    tokens = torch.randint(1, 5, shape, generator=g, dtype=torch.int32)
    pos = torch.arange(slots, dtype=torch.int32).expand(shape)
    k = torch.randn(*shape, DIM, generator=g) * scale
    q = torch.randn(batch, HEADS * GROUP, steps, DIM, generator=g) * scale
    entries = Entries(k, torch.randn(*shape, DIM, generator=g), tokens.float().log(), tokens, pos)
    return entries, Observation(q, torch.arange(slots - steps, slots, dtype=torch.int32).expand(batch, -1), SCALE)


def by_steps(entries, seen, alpha):
    """S and c of Eq. 8 with probabilities, step by step; fp64, no logs."""
    total = torch.zeros(entries.pos.shape, dtype=torch.float64)
    weight = total.clone()
    for b in range(total.shape[0]):
        for w in seen.q_pos[b].argsort().tolist():
            at = int(seen.q_pos[b, w])
            if at < 0:
                continue
            for h in range(HEADS):
                there = entries.valid[b, h] & (entries.pos[b, h] <= at)
                mass = torch.zeros(total.shape[2], dtype=torch.float64)
                for r in range(GROUP):
                    logits = SCALE * entries.k[b, h].double() @ seen.q[b, h * GROUP + r, w].double()
                    logits = (logits + entries.log_votes[b, h].double()).masked_fill(~there, -torch.inf)
                    mass += logits.softmax(-1) / GROUP
                total[b, h] = alpha * total[b, h] + (1 - alpha) * mass
                weight[b, h] = alpha * weight[b, h] + (1 - alpha) * there
    return total / weight


def until(entries, count):
    return Entries(*(getattr(entries, name)[:, :, :count] for name in Entries.__dataclass_fields__))


def grown(state, entries, count):
    """``state`` and what came after it, up to ``count`` entries."""
    tail = Entries(*(getattr(entries, name)[:, :, state.pos.shape[2] : count] for name in vars(until(entries, 0))))
    tail = Predicted(**vars(tail), ema=unseen(tail))
    return Predicted(*(torch.cat([getattr(state, name), getattr(tail, name)], 2) for name in vars(tail)))


@pytest.mark.parametrize("pieces", [[10], [3, 10], [1, 2, 7, 10], list(range(1, 11))])
def test_it_is_the_recursion_step_by_step(pieces):
    """All steps at once, or piece by piece while entries are added and queries shown twice: what single steps give."""
    entries, seen = made()
    state = until(entries, 14)
    state = Predicted(**vars(state), ema=unseen(state))
    for end in pieces:
        shown = replace(seen, q=seen.q[:, :, :end], q_pos=seen.q_pos[:, :end])
        state = predict(grown(state, entries, 14 + end), shown, ALPHA)
    expected = by_steps(entries, seen, ALPHA)
    torch.testing.assert_close(log_mass(state).double().exp(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(unpack(pack(state)).ema, state.ema, rtol=0, atol=0)


def test_constant_attention_predicts_itself():
    """The same query at every step predicts its own attention, with any alpha (dividing by 1 - alpha^t does not)."""
    entries, seen = made(batch=1)
    seen = replace(seen, q=seen.q[:, :, :1].expand_as(seen.q))
    old = until(entries, 14)  # what every step sees
    alone = by_steps(old, replace(seen, q=seen.q[:, :, :1], q_pos=seen.q_pos[:, -1:]), ALPHA)
    for alpha in (0.5, 0.99):
        assert (log_mass(predict(old, seen, alpha)).exp() - alone).abs().max() < 1e-6


def test_each_sequence_goes_by_its_own_steps():
    """Unused queries change nothing: a padded sequence is what it is alone, and one without steps stays as it was."""
    entries, seen = made()
    q_pos = seen.q_pos.clone()
    q_pos[1, :6] = -1
    both = predict(entries, replace(seen, q_pos=q_pos), ALPHA)
    alone = predict(
        Entries(*(x[1:] for x in vars(entries).values())),
        replace(seen, q=seen.q[1:, :, 6:], q_pos=q_pos[1:, 6:]),
        ALPHA,
    )
    torch.testing.assert_close(both.ema[1:], alone.ema, rtol=1e-6, atol=1e-6)
    assert torch.equal(predict(both, seen, ALPHA).ema, both.ema)
    recent = replace(seen, q=seen.q[:, :, -4:], q_pos=seen.q_pos[:, -4:])
    torch.testing.assert_close(predict(entries, since(seen, 4), ALPHA).ema, predict(entries, recent, ALPHA).ema)


def test_huge_logits_stay_finite():
    """Logits of hundreds leave no NaN, and what no step has seen is predicted to get nothing."""
    entries, seen = made(scale=60.0)
    seen = replace(seen, q_pos=torch.where(seen.q_pos < 20, seen.q_pos, -1))
    mass = log_mass(predict(entries, seen, ALPHA))
    assert not mass.isnan().any() and (mass < 1e-5).all() and mass[..., 20:].isneginf().all()


def test_masses_of_merged_entries_add_up():
    """A merged entry is predicted to get what its members would; the others keep theirs."""
    entries, seen = made(batch=1)
    state = predict(entries, seen, ALPHA)
    kept = torch.arange(2, 24).expand(1, HEADS, -1)
    target = torch.tensor([3, 3, 3])  # of head 0: entries 0 and 1 join entry 5
    flags = torch.zeros(1, HEADS, 22, dtype=torch.bool)
    flags[0, 0, 3] = True
    out = state.plain.take(kept, torch.ones_like(kept, dtype=torch.bool))
    groups = Groups(torch.tensor([0, 1, 5]), target, flags)
    before, after = (log_mass(x).exp() for x in (state, merged(state, out, kept, groups)))
    torch.testing.assert_close(after[0, 0, 3], before[0, 0, [0, 1, 5]].sum())
    torch.testing.assert_close(after[0, 1], before[0, 1, 2:])
    torch.testing.assert_close(after.sum(), before.sum() - before[0, 1, :2].sum())
