"""Attention Matching against dense linear algebra on tiny caches."""

import dataclasses
import math

import pytest
import torch

from kvpass.budget import Budget
from kvpass.policies import AttentionMatching, Reference
from tests.policies.tiny import DIM, GROUP, HEADS, choose, kept, layers_of

N, QUOTA, WINDOW, SINKS = 30, 12, 3, 1


def policy(**fields):
    return AttentionMatching(window=WINDOW, sinks=SINKS, references=20, **fields)


def compressed(chosen):
    """One layer of one sequence and what a policy makes of it."""
    ((entries, seen),) = layers_of(chosen, [N], count=1)
    (out,) = chosen.compress([(entries, seen)], Budget.parse(QUOTA), [N])
    return entries, seen, out


def masses(entries, seen, h):
    """[R, N] exponentials of the group's queries relative to each one's largest logit."""
    q = seen.q[0, h * GROUP : (h + 1) * GROUP].reshape(-1, DIM)
    logits = seen.scale * q @ entries.k[0, h].T
    return (logits - logits.amax(-1, keepdim=True)).exp()


def votes_by_loop(m, y, low, high):
    """Clamped least squares, then two projected-gradient steps; the shrinkage to 1 is a few more equations."""
    norm = torch.linalg.matrix_norm(m, 2)
    a = torch.cat([m, 1e-3 * norm * torch.eye(m.shape[1], dtype=m.dtype)])
    b = torch.cat([y, (1e-3 * norm).expand(m.shape[1])])
    w = torch.linalg.lstsq(a, b[:, None]).solution[:, 0].clamp(math.exp(low), math.exp(high))
    for _ in range(2):
        w = (w - m.T @ (m @ w - y) / norm**2).clamp(math.exp(low), math.exp(high))
    return w


@pytest.mark.parametrize("votes", [(-3.0, 3.0), (-0.2, 0.4)])
def test_highest_attention(votes):
    """Keys by root mean square weight; votes and values are the closed forms; sinks and window are exact."""
    entries, seen, out = compressed(policy(votes=votes))
    for h in range(HEADS):
        m = masses(entries, seen, h)
        a = m / m.sum(-1, keepdim=True)
        stay = choose(a.square().mean(0).sqrt().tolist(), QUOTA, N, SINKS, WINDOW)
        assert kept(out, 0)[h] == stay
        exact = [n for n in stay if n < SINKS or n >= N - WINDOW]
        free = [i for i, n in enumerate(stay) if n not in exact]
        assert torch.equal(out.k[0, h], entries.k[0, h, stay])
        w = torch.ones(QUOTA, dtype=torch.float64)
        w[free] = votes_by_loop(m[:, stay][:, free], m.sum(-1) - m[:, exact].sum(-1), *votes)
        # Power iteration gives the spectral norm, and log-votes are fp32.
        torch.testing.assert_close(out.log_votes[0, h].double(), w.log(), rtol=1e-3, atol=1e-3)
        x = m[:, stay] * w
        x = x / x.sum(-1, keepdim=True)
        v = entries.v[0, h, stay].clone()
        residual, x = a @ entries.v[0, h] - x @ v, x[:, free]
        lam = 1e-3 * torch.linalg.matrix_norm(x, 2) ** 2
        v[free] += torch.linalg.solve(x.T @ x + lam * torch.eye(len(free), dtype=torch.float64), x.T @ residual)
        torch.testing.assert_close(out.v[0, h], v, rtol=1e-2, atol=1e-2)
        held = [i for i in range(QUOTA) if i not in free]
        assert torch.equal(out.v[0, h, held], entries.v[0, h, exact]) and not out.log_votes[0, h, held].any()


@pytest.mark.parametrize("rounds", [2, 100])
def test_omp(rounds):
    """Keys by greedy pursuit of the denominator, a round's keys at a time."""
    entries, seen, out = compressed(policy(keys="omp", rounds=rounds))
    for h in range(HEADS):
        m = masses(entries, seen, h)
        exact = [n for n in range(N) if n < SINKS or n >= N - WINDOW]
        y = m.sum(-1) - m[:, exact].sum(-1)
        chosen, left = [], y
        count = QUOTA - len(exact)
        while len(chosen) < count:
            gains = sorted((-float(m[:, n] @ left), n) for n in range(N) if n not in chosen and n not in exact)
            chosen += [n for _, n in gains[: min(count - len(chosen), -(-count // rounds))]]
            left = y - m[:, chosen] @ votes_by_loop(m[:, chosen], y, -7, 7)
        assert kept(out, 0)[h] == sorted(exact + chosen)


@pytest.mark.parametrize("references", [7, 100])
def test_rehearsal(references):
    """Judges may be the prompt's tokens repeated after it: some of them, evenly, and nobody else."""
    chosen = AttentionMatching(window=WINDOW, sinks=SINKS, references=references, judges="rehearsal", value_fit=False)
    assert chosen.wants == "rehearsal" and chosen.rehearsal(torch.arange(5)).tolist() == list(range(5))
    entries, seen, out = compressed(chosen)
    late = torch.linspace(0, N - 1, min(references, N)).round().long() + N
    at = [n for n, pos in enumerate(seen.q_pos[0].tolist()) if pos in late]
    assert len(at) == min(references, N)
    seen = dataclasses.replace(seen, q=seen.q[:, :, at])
    for h in range(HEADS):
        m = masses(entries, seen, h)
        weight = (m / m.sum(-1, keepdim=True)).square().mean(0).sqrt()
        assert kept(out, 0)[h] == choose(weight.tolist(), QUOTA, N, SINKS, WINDOW)


def output(entries, seen):
    """[R, Dv] what the observed queries get, unmasked."""
    k, v, votes = (x.double().repeat_interleave(GROUP, 1) for x in (entries.k, entries.v, entries.log_votes))
    logits = seen.scale * seen.q @ k.transpose(2, 3) + votes.unsqueeze(2)
    return logits.softmax(-1) @ v


def test_each_fit_lowers_its_error():
    """For the queries that judged, votes bring the denominator closer to the full cache's, and values the output."""
    outputs, denominators = [], []
    for chosen in (Reference(window=3, sinks=1, references=20), policy(value_fit=False), policy()):
        entries, seen, out = compressed(chosen)
        outputs.append(float((output(out, seen) - output(entries, seen)).norm()))
        gap = 0.0
        for h in range(HEADS):
            m = masses(entries, seen, h)
            gap += (m[:, kept(out, 0)[h]] @ out.log_votes[0, h].double().exp() - m.sum(-1)).square().sum()
        denominators.append(float(gap))
    assert denominators[0] > 4 * denominators[1] and denominators[1] == denominators[2]
    assert outputs[2] < 0.8 * min(outputs[:2])


def test_fewer_queries_than_keys():
    """Underdetermined fits shrink to the original votes and values instead of to the minimum norm."""
    chosen = AttentionMatching(window=1, sinks=0, references=2)
    ((entries, seen),) = layers_of(chosen, [N], count=1)
    (out,) = chosen.compress([(entries, seen)], Budget.parse(20), [N])
    assert seen.q.shape[2] * GROUP < 20
    moved = (out.v[0, 0] - entries.v[0, 0, kept(out, 0)[0]]).norm()
    assert 0 < moved < 2 * entries.v[0, 0].norm() and out.log_votes.abs().max() < 3


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"keys": "om"}, "attention, omp"),
        ({"judges": "me"}, "prompt, rehearsal"),
        ({"rounds": 0}, "rounds"),
        ({"votes": (1.0, 2.0)}, "range around 0"),
    ],
)
def test_refuses(fields, message):
    """A field that cannot be meant is refused at construction."""
    with pytest.raises(ValueError, match=message):
        policy(**fields)
