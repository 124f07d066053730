"""Published eviction methods against plain loops written from their descriptions."""

import dataclasses

import pytest
import torch

from kvpass.budget import Budget
from kvpass.kernels.entries import Observation
from kvpass.policies import H2O, TOVA, Oracle, PyramidKV, Random, SnapKV
from kvpass.policies.allocate import fit
from tests.policies.tiny import GROUP, HEADS, choose, kept, layers_of

N = 25


def one_layer(policy, length=N):
    """One layer of one sequence and its two tensors of keys and queries."""
    ((entries, seen),) = layers_of(policy, [length], count=1)
    return entries, seen


def weights(entries, seen, h):
    """[G, W, N] causal softmax weights of the group's observed queries, one row at a time."""
    rows = torch.zeros(GROUP, len(seen.q_pos[0]), entries.k.shape[2], dtype=torch.float64)
    for g in range(GROUP):
        for w, at in enumerate(seen.q_pos[0].tolist()):
            logits = seen.scale * entries.k[0, h] @ seen.q[0, h * GROUP + g, w]
            logits[at + 1 :] = -torch.inf
            rows[g, w] = logits.softmax(0)
    return rows


@pytest.mark.parametrize("quota", [1, 2, 7, 12, 24])
def test_h2o(quota):
    """Column sums over all queries of the prompt; half a row is heavy hitters, half its newest tokens."""
    policy = H2O()
    entries, seen = one_layer(policy)
    assert seen.q_pos.shape[1] == N
    (out,) = policy.compress([(entries, seen)], Budget.parse(quota), [N])
    for h in range(HEADS):
        heavy = weights(entries, seen, h).sum((0, 1)).tolist()
        recent = -(-quota // 2)
        old = sorted(range(N - recent), key=lambda n: -heavy[n])[: quota - recent]
        assert kept(out, 0)[h] == sorted(old) + list(range(N - recent, N))


def test_tova():
    """The newest query's weights averaged over all heads choose the same tokens for every head of the layer."""
    entries, seen = one_layer(TOVA())
    (out,) = TOVA().compress([(entries, seen)], Budget.parse(9), [N])
    mean = torch.stack([weights(entries, seen, h) for h in range(HEADS)]).mean((0, 1, 2)).tolist()
    assert kept(out, 0) == [choose(mean, 9, N, 0, 1)] * HEADS


def test_tova_after_rows_have_parted():
    """Where rows no longer hold the same tokens, a token is averaged over the heads that hold it."""
    policy = TOVA()
    entries, seen = one_layer(policy)
    keep = torch.ones(1, HEADS, N, dtype=torch.bool)
    keep[0, 0, 3] = keep[0, 1, 7] = False
    parted = policy.represent(entries, seen, keep)
    score = policy.score(parted, seen)
    own = [
        weights(dataclasses.replace(parted, k=parted.k[:, h : h + 1].expand(-1, HEADS, -1, -1)), seen, h)
        for h in (0, 1)
    ]
    own = [w.mean((0, 1)) for w in own]
    places = [dict(zip(kept(parted, 0)[h], own[h].tolist(), strict=True)) for h in (0, 1)]
    for h in (0, 1):
        for slot, at in enumerate(kept(parted, 0)[h][:-1]):
            held = [place[at] for place in places if at in place]
            assert float(score[0, h, slot]) == pytest.approx(GROUP * sum(held) / len(held))


def test_oracle():
    """What queries behind the prompt attend to, over every entry."""
    policy = Oracle()
    entries, seen = one_layer(policy)
    later = Observation(seen.q, torch.arange(N, N + seen.q.shape[2], dtype=torch.int32)[None], seen.scale)
    mass = policy.score(entries, later)[0]
    for h in range(HEADS):
        torch.testing.assert_close(mass[h, :-1], weights(entries, later, h).sum((0, 1))[:-1].float())
    assert policy.wants == "continuation" and mass[:, -1].isposinf().all()


def test_random():
    """A draw by seed, layer, head and position: repeatable, and even over the prompt."""
    entries, seen = one_layer(Random(), 400)
    layers = [(entries, seen)] * 2
    first, second = Random().scores(layers)
    assert torch.equal(first, Random().scores(layers)[0])
    rows = [first[0, 0], first[0, 1], second[0, 0], Random(seed=1).scores(layers)[0][0, 0]]
    draws = torch.stack(rows)[:, :-1].double()
    assert draws.min() >= 0 and draws.max() < 1
    assert (draws.corrcoef() - torch.eye(4)).abs().max() < 0.2  # four standard errors at 399 draws
    assert (draws.mean(-1) - 0.5).abs().max() < 0.06


@pytest.mark.parametrize("beta", [1, 3, 20])
@pytest.mark.parametrize("quota", [6, 11, 17, 30, 39])
def test_pyramidkv(quota, beta):
    """Entries fall along the published line from the first layer to the last, to within one, and sum exactly."""
    policy = PyramidKV(window=3, sinks=2, beta=beta)
    layers = layers_of(policy, [40], count=4)
    counts = policy.allocate([policy.score(*pair) for pair in layers], [quota * 4 * HEADS])
    assert sum(int(count.sum()) for count in counts) == quota * 4 * HEADS
    average, most = quota - 5, 2 * (quota - 5) - (quota - 5) // beta
    most = min(most, 35)
    least = 2 * average - most
    for layer, count in enumerate(counts):
        line = average if 2 * average > 40 else most - layer * (most - least) / 3
        assert ((count - 5 - line).abs() <= 1).all()


def test_adakv_blends_counts():
    """Each head: what it wins in its layer's pool times 1 - floor, plus floor of the even share; the total is kept."""
    policy = SnapKV(window=2, sinks=1, allocator="blend", floor=0.3)
    ((entries, seen),) = layers_of(policy, [40], count=1)
    score = policy.score(entries, seen)
    (counts,) = policy.allocate([score], [2 * 15])
    pool = sorted(((float(s), h) for h in range(HEADS) for s in score[0, h, 1:-2]), key=lambda x: -x[0])[: 2 * 12]
    won = [sum(h == winner for _, winner in pool) for h in range(HEADS)]
    published = [3 + round(0.7 * m + int(0.3 * 12)) for m in won]
    assert max(abs(c - p) for c, p in zip(counts[0].tolist(), published, strict=True)) <= 1  # what rounding loses
    assert counts.sum() == 30


def test_fit_meets_totals():
    """Wishes are raised or lowered evenly to the total, within what rows have and at least one entry."""
    available = torch.tensor([[9, 2, 5]])
    for total in range(17):
        for wish in ([0, 0, 0], [9, 9, 9], [4, 1, 2], [9, 0, 0]):
            got = fit(torch.tensor([wish]), torch.tensor([total]), available)
            assert got.sum() == total and (got <= available).all() and (got >= 0).all()
            assert total < 3 or (got >= 1).all()
    assert fit(torch.tensor([[4, 1, 2]]), torch.tensor([9]), available).tolist() == [[5, 2, 2]]
