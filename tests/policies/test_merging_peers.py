"""Published merging methods against plain loops written from their descriptions."""

import math

import pytest
import torch

from kvpass.budget import Budget
from kvpass.policies import D2O, CaM, KVMerger
from kvpass.policies.d2o import _proportional
from tests.policies.tiny import GROUP, HEADS, choose, kept, layers_of

N, QUOTA = 25, 11


def compressed(policy, length=N, quota=QUOTA, count=1):
    """The layers of one sequence and what a policy makes of them."""
    layers = layers_of(policy, [length], count=count)
    return layers, list(policy.compress(layers, Budget.parse(quota), [length]))


def accumulated(entries, seen, h):
    """[N] causal softmax weights summed over all queries of the group, one query at a time."""
    total = torch.zeros(entries.k.shape[2], dtype=torch.float64)
    for g in range(GROUP):
        for n in range(entries.k.shape[2]):
            total[: n + 1] += (seen.scale * entries.k[0, h, : n + 1] @ seen.q[0, h * GROUP + g, n]).softmax(0)
    return total


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


def same(out, h, keys, values, votes):
    """Row ``h`` of ``out`` holds these, up to the fp32 of log-votes and accumulated attention."""
    torch.testing.assert_close(out.k[0, h], torch.stack(keys), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.v[0, h], torch.stack(values), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.log_votes[0, h].double(), torch.tensor(votes).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keep", ["heavy", "streaming"])
@pytest.mark.parametrize("votes", [False, True])
def test_cam(keep, votes):
    """Each dropped value joins its next kept neighbours' in expectation; keys stay."""
    policy = CaM(sinks=2, spread=3, keep=keep, deterministic=True, votes=votes)
    ((entries, seen),), (out,) = compressed(policy)
    for h in range(HEADS):
        mass = accumulated(entries, seen, h)
        stay = choose(mass, QUOTA, N, 2, 5) if keep == "heavy" else [*range(6), *range(N - 5, N)]
        assert kept(out, 0)[h] == stay
        mass /= torch.arange(N, 0, -1)  # queries that see it
        value = {n: entries.v[0, h, n].clone() for n in stay}
        vote = dict.fromkeys(stay, 1.0)
        for e in (n for n in range(N) if n not in stay):
            after = [n for n in stay if n > e][:3]
            chance = min(1.0, float(mass[e] / mass[after].mean()))
            for n in after:
                value[n] += chance * entries.v[0, h, e] / len(after)
                vote[n] += chance / len(after)
        keys = [entries.k[0, h, n] for n in stay]
        same(out, h, keys, list(value.values()), [math.log(vote[n]) if votes else 0.0 for n in stay])


def test_cam_draws():
    """The draws are the seed's: repeatable, all or nothing, and on average the expectation."""
    _, (one,) = compressed(CaM(sinks=2, spread=1, seed=3))
    _, (two,) = compressed(CaM(sinks=2, spread=1, seed=3))
    assert torch.equal(one.v, two.v)
    _, (expected,) = compressed(CaM(sinks=2, spread=1, deterministic=True))
    drawn = torch.stack([compressed(CaM(sinks=2, spread=1, seed=s))[1][0].v for s in range(300)])
    assert drawn.std(0).max() > 0.1
    # Four standard errors of a mean of 300.
    assert ((drawn.mean(0) - expected.v).abs() <= 4 * drawn.std(0) / 300**0.5 + 1e-6).all()
    layers, out = compressed(CaM(sinks=2, spread=1), count=2)
    again = list(CaM(sinks=2, spread=1).compress([layers[0], layers[0]], Budget.parse(QUOTA), [N]))
    assert torch.equal(again[0].v, out[0].v) and not torch.equal(again[1].v, out[0].v)


@pytest.mark.parametrize("mode", ["paper", "code"])
@pytest.mark.parametrize("votes", [False, True])
def test_d2o(mode, votes):
    """Dropped entries no less similar than the mean join their nearest kept one, by the published weights."""
    policy = D2O(sinks=2, mode=mode, votes=votes)
    ((entries, seen),), (out,) = compressed(policy)
    nearest = {}
    for h in range(HEADS):
        stay = choose(accumulated(entries, seen, h), QUOTA, N, 2, 5)
        assert kept(out, 0)[h] == stay
        for e in (n for n in range(N) if n not in stay):
            nearest[h, e] = max((cosine(entries.k[0, h, e], entries.k[0, h, c]), c) for c in stay)
    tau = sum(u for u, _ in nearest.values()) / len(nearest)
    for h in range(HEADS):
        keys, values, log_votes = [], [], []
        for c in kept(out, 0)[h]:
            members = [(u, e) for (row, e), (u, at) in nearest.items() if row == h and at == c and u >= tau]
            if mode == "paper":
                whole = sum(math.exp(u) for u, _ in members) + math.e
                weights = [(math.e / whole, c), *((math.exp(u) / whole, e) for u, e in members)]
            else:
                weights = [(w / (1 + len(members)), e) for w, e in [(1.0, c), *members]]
            keys.append(sum(w * entries.k[0, h, e] for w, e in weights))
            values.append(sum(w * entries.v[0, h, e] for w, e in weights))
            log_votes.append(math.log(1 + len(members)) if votes else 0.0)
        same(out, h, keys, values, log_votes)


def test_d2o_layer_budgets():
    """Layers share the budget by softmax(-variance), heads of a layer evenly; whole layers are charged."""
    layers, out = compressed(D2O(), length=40, quota=10, count=4)
    uneven = []
    for entries, seen in layers:
        # The newest entry, seen by its own query alone, does not take part.
        spread = torch.stack([accumulated(entries, seen, h)[:-1].var(unbiased=False) for h in range(HEADS)])
        uneven.append(((spread - spread.min()) / (spread.max() - spread.min())).mean())
    share = torch.softmax(-torch.stack(uneven), 0) * 10 * HEADS * 4
    held = [int(e.lengths.sum()) for e in out]
    assert sum(held) == 80 and all(abs(n - float(s)) < 1 for n, s in zip(held, share, strict=True))
    _, out = compressed(D2O(uncompressed=(0, -1)), length=40, quota=25, count=4)
    assert [int(e.lengths.sum()) for e in out][::3] == [80, 80] and sum(int(e.lengths.sum()) for e in out) == 200
    with pytest.raises(ValueError, match="does not hold the uncompressed layers"):
        compressed(D2O(uncompressed=(0, -1)), length=40, quota=20, count=4)


def test_proportional_split_is_capped():
    """A layer without room passes its share on; floors hold and the sum is exact."""
    share = torch.tensor([[0.7], [0.2], [0.1]])
    got = _proportional(share, torch.full((3, 1), 2), torch.tensor([[5], [40], [40]]), torch.tensor([20]))
    assert got.flatten().tolist() == [5, 10, 5]


def pairs_above(entries, h, others, eps):
    return [n for n in others if n - 1 in others and cosine(entries.k[0, h, n], entries.k[0, h, n - 1]) > eps]


@pytest.mark.parametrize("sigma", [None, 2.0])
@pytest.mark.parametrize("votes", [False, True])
@pytest.mark.parametrize("least", [-1.0, 0.9])
def test_kvmerger(sigma, votes, least):
    """Runs of neighbours above the threshold that meets the quota, each a Gaussian mean about its heaviest."""
    policy = KVMerger(heavy_share=0.2, least=least, sigma=sigma, votes=votes, value_scale="members")
    ((entries, seen),), (out,) = compressed(policy)
    for h in range(HEADS):
        mass = accumulated(entries, seen, h)
        reserved = choose(mass, 4, N, 0, 2)
        others = [n for n in range(N) if n not in reserved]
        low, high = least, 1.0  # the search the paper leaves to the reader, by bisection
        for _ in range(50):
            eps = (low + high) / 2
            sets = len(others) - len(pairs_above(entries, h, others, eps))
            low, high = (low, eps) if sets > QUOTA - 4 else (eps, high)
        joined = pairs_above(entries, h, others, low)
        runs = []
        for n in others:
            runs = [*runs[:-1], [*runs[-1], n]] if n in joined else [*runs, [n]]
        runs = sorted(runs, key=lambda run: (len(run) == 1, -float(mass[run].max())))[: QUOTA - 4]
        found = {n: (entries.k[0, h, n], entries.v[0, h, n], 1) for n in reserved}
        for run in runs:
            pivot = max(run, key=lambda n: float(mass[n]))
            apart = {n: float((entries.k[0, h, n] - entries.k[0, h, pivot]).norm()) for n in run}
            width = sigma or sum(apart.values()) / max(1, len(run) - 1) or 1.0
            weight = {n: math.exp(-(x**2) / (2 * width**2)) for n, x in apart.items()}
            whole = sum(weight.values())
            key = sum(w / whole * entries.k[0, h, n] for n, w in weight.items())
            value = sum(w / whole * entries.v[0, h, n] for n, w in weight.items())
            found[pivot] = (key, value if votes else len(run) * value, len(run))
        assert kept(out, 0)[h] == sorted(found) and len(found) == QUOTA
        keys, values, sizes = zip(*(found[n] for n in sorted(found)), strict=True)
        same(out, h, keys, values, [math.log(s) if votes else 0.0 for s in sizes])
        assert out.tokens[0, h].tolist() == list(sizes)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: CaM(keep="all"), "heavy, streaming"),
        (lambda: CaM(spread=0), "spread"),
        (lambda: D2O(mode="papr"), "paper, code"),
        (lambda: D2O(recent_share=2.0), "recent_share"),
        (lambda: KVMerger(recent_share=0.8, heavy_share=0.3), "together at most 1"),
        (lambda: KVMerger(sigma=0.0), "sigma"),
        (lambda: KVMerger(least=2.0), "least"),
        (lambda: KVMerger(value_scale="set"), "members, mean"),
    ],
)
def test_refuses(make, message):
    """A field that cannot be meant is refused at construction."""
    with pytest.raises(ValueError, match=message):
        make()
