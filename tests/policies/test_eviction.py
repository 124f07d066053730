"""Published eviction methods against plain loops written from their descriptions."""

import dataclasses

import pytest
import torch

from kvpass.budget import Budget
from kvpass.kernels.entries import Observation
from kvpass.kernels.frame import Frame
from kvpass.policies import H2O, TOVA, DuoAttention, ExpectedAttention, Oracle, PyramidKV, Random, SnapKV
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


FRAME = Frame(torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([1.0, 0.1], dtype=torch.float64))


def rotation(at):
    """[4, 4] matrix that turns a vector from position 0 to position ``at``, as FRAME does."""
    matrix = torch.zeros(4, 4, dtype=torch.float64)
    for (a, b), freq in zip(((0, 2), (1, 3)), (1.0, 0.1), strict=True):
        angle = torch.tensor(at * freq, dtype=torch.float64)
        matrix[a, a] = matrix[b, b] = angle.cos()
        matrix[b, a], matrix[a, b] = angle.sin(), -angle.sin()
    return matrix


@pytest.mark.parametrize("frame", [FRAME, None], ids=["turning", "still"])
def test_expected_attention(frame):
    """The mean of exp(q·k) over a Gaussian fitted to un-rotated queries, at the mean rotation to come, times |v|."""
    policy = ExpectedAttention(sinks=2, references=11, future=6, epsilon=0.01)
    entries, seen = one_layer(policy)
    seen = dataclasses.replace(seen, frame=frame)
    assert seen.q_pos[0].min() == 2 and seen.q_pos.shape[1] == 11
    (out,) = policy.compress([(entries, seen)], Budget.parse(9), [N])
    for h in range(HEADS):
        weight = torch.zeros(N, dtype=torch.float64)
        for g in range(GROUP):
            turn = [rotation(at) if frame else torch.eye(4, dtype=torch.float64) for at in range(N + 6)]
            q = seen.q[0, h * GROUP + g]
            q = torch.stack([turn[at].T @ row for at, row in zip(seen.q_pos[0].tolist(), q, strict=True)])
            coming = torch.stack(turn[N:]).mean(0)
            mean, cov = coming @ q.mean(0), coming @ q.T.cov(correction=0) @ coming.T
            k = entries.k[0, h]
            logits = torch.stack([0.5 * mean @ k[n] + 0.125 * k[n] @ cov @ k[n] for n in range(2, N)])
            weight[2:] += logits.softmax(0) / GROUP
        score = ((weight + 0.01) * entries.v[0, h].norm(dim=-1)).tolist()
        assert kept(out, 0)[h] == choose(score, 9, N, 2, 1)


def test_duo_scores_heads_by_distance():
    """The mean running sum of the mean query's attention to the mean key at each distance."""
    policy = DuoAttention(references=9, span=7)
    entries, seen = one_layer(policy)
    seen = dataclasses.replace(seen, frame=FRAME)
    got = policy.retrieval(entries, seen)[0]
    for h in range(HEADS):
        key = torch.stack([rotation(n).T @ entries.k[0, h, n] for n in range(N)]).mean(0)
        area = 0.0
        for g in range(GROUP):
            at = seen.q_pos[0].tolist()
            query = torch.stack([rotation(n).T @ seen.q[0, h * GROUP + g, w] for w, n in enumerate(at)]).mean(0)
            logits = torch.stack([0.5 * (rotation(6) @ query) @ (rotation(n) @ key) for n in range(7)])
            area += float(logits.softmax(0).cumsum(0).mean()) / GROUP
        assert float(got[h]) == pytest.approx(area, abs=1e-6)


@pytest.mark.parametrize("budget", [1, 4, 9, 14, 22, 24])
def test_duo_splits_rows(budget):
    """The best rows are whole, one takes what is left, the others hold sinks and recent tokens; less budget, fewer."""
    policy = DuoAttention(sinks=1, recent=5, references=9, span=7)
    layers = [(e, dataclasses.replace(s, frame=FRAME)) for e, s in layers_of(policy, [N])]
    head = torch.cat([policy.retrieval(*pair)[0] for pair in layers])
    out = list(policy.compress(layers, Budget.parse(budget), [N]))
    counts = torch.cat([e.lengths[0] for e in out])
    assert counts.sum() == budget * len(counts)
    small = max(1, min(6, budget // 2))
    whole, left = divmod(len(counts) * (budget - small), N - small)
    expected = [N] * whole + ([small + left] if whole < len(counts) else []) + [small] * (len(counts) - whole - 1)
    assert counts[head.argsort(descending=True)].tolist() == expected
    for e in out:
        for positions in kept(e, 0):
            sinks = min(1, len(positions) // 5) if len(positions) < N else 0
            recent = len(positions) - sinks
            assert positions == list(range(sinks)) + list(range(N - recent, N))
