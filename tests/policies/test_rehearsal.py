"""KVzip and HeadKV, which judge by tokens rehearsed after the prompt, against plain loops."""

import dataclasses

import pytest
import torch

from kvpass.budget import Budget
from kvpass.policies import HeadKV, KVzip
from tests.policies.tiny import GROUP, HEADS, kept, layers_of

N = 25


def attention(entries, seen, h, g, at, visible):
    """Weights of the query at position ``at`` over the positions ``visible``, entries and rehearsed tokens."""
    slot = seen.q_pos[0].tolist().index(at)
    keys = torch.cat([entries.k[0, h], seen.own_k[0, h]])
    return dict(zip(visible, (0.5 * keys[visible] @ seen.q[0, h * GROUP + g, slot]).softmax(0).tolist(), strict=True))


def test_kvzip_repeats_in_chunks():
    """Each chunk after the instruction and the end of the chunk before."""
    policy = KVzip(chunk=10, lead=2, instruction=(7, 8))
    tokens = policy.rehearsal(torch.arange(100, 125)).tolist()
    assert tokens == [7, 8, *range(100, 110), 7, 8, *range(108, 120), 7, 8, *range(118, 125)]
    assert KVzip().rehearsal(torch.arange(5)).tolist() == list(range(5))


def test_kvzip():
    """The largest weight over sinks, own chunk and repeated tokens so far; the best of all rows of the model."""
    policy = KVzip(sinks=2, chunk=10, lead=2, instruction=(7, 8))
    layers = layers_of(policy, [N], count=2)
    pool = []
    for layer, (entries, seen) in enumerate(layers):
        start = N
        for first, last, size in ((0, 10, 12), (10, 20, 14), (20, 25, 9)):
            for h in range(HEADS):
                best = dict.fromkeys(range(first, last), 0.0)
                for g in range(GROUP):
                    for at in range(start, start + size):
                        visible = sorted({0, 1, *range(first, last)}) + list(range(start, at + 1))
                        weight = attention(entries, seen, h, g, at, visible)
                        best = {n: max(value, weight[n]) for n, value in best.items()}
                pool += [(-value, layer, h, n) for n, value in best.items() if 2 <= n < N - 1]
            start += size
    budget = 9
    chosen = {key[1:] for key in sorted(pool)[: (budget - 3) * 2 * HEADS]}
    for layer, out in enumerate(policy.compress(layers, Budget.parse(budget), [N])):
        for h in range(HEADS):
            assert kept(out, 0)[h] == sorted({0, 1, N - 1} | {n for l, own, n in chosen if (l, own) == (layer, h)})


def test_headkv_scores_heads_by_what_they_find_again():
    """Weight on those of the most attended tokens that lie in the repeated span's original, over its length."""
    policy = HeadKV(window=2, sinks=1, needles=3, span=4)
    ((entries, seen),) = layers_of(policy, [N], count=1)
    starts = [0, 10, 21]  # spread over 25 tokens: 0, 10.5 rounded to even, 21
    tokens = policy.rehearsal(torch.arange(N)).tolist()
    assert tokens == [n for start in starts for n in range(start, start + 4)]
    got = policy.retrieval(entries, seen)[0]
    for h in range(HEADS):
        found = 0.0
        for g in range(GROUP):
            for step in range(12):
                weight = attention(entries, seen, h, g, N + step, list(range(N + step + 1)))
                top = sorted(weight, key=weight.get, reverse=True)[:4]
                start = starts[step // 4]
                found += sum(weight[n] for n in top if start <= n < start + 4) / 4
        assert float(got[h]) == pytest.approx(found / (GROUP * 12))


@pytest.mark.parametrize("budget", [4, 7, 12, 20])
@pytest.mark.parametrize("beta", [1.01, 2.0])
def test_headkv_shares_a_pool(budget, beta):
    """Rows get sinks, window, the part outside the pool and their share of it; the rest evenly; totals are exact."""
    policy = HeadKV(window=2, sinks=1, beta=beta, needles=3, span=4)
    layers = layers_of(policy, [N])
    head = torch.cat([policy.retrieval(*pair)[0] for pair in layers])
    scores = [policy.score(*pair) for pair in layers]
    counts = torch.cat([quota[0] for quota in policy.quotas(layers, scores, [budget * len(head)])])
    average = budget - 3
    pool = int(average / beta)
    wanted = (3 + head / head.sum() * pool * len(head) + average - pool).round().clamp(max=N)
    spare = (budget * len(head) - wanted.sum()) / len(head)
    assert counts.sum() == budget * len(head) and counts.min() >= 1 and counts.max() <= N
    assert ((counts - wanted - spare).abs() <= 1 + (wanted == N) * spare.abs()).all()


def test_headkv_votes_are_the_prompts():
    """What stays inside a row is what the prompt's last queries ask for, as without a rehearsal."""
    policy = HeadKV(window=2, sinks=1, needles=3, span=4)
    ((entries, seen),) = layers_of(policy, [N], count=1)
    alone = dataclasses.replace(seen, q=seen.q[:, :, :2], q_pos=seen.q_pos[:, :2])
    assert torch.equal(policy.score(entries, seen), super(HeadKV, policy).score(entries, alone))


@pytest.mark.parametrize("policy", [KVzip(), HeadKV()])
def test_without_a_rehearsal(policy):
    """Fewer queries than the policy rehearses are refused in one sentence."""
    ((entries, seen),) = layers_of(policy, [N], count=1)
    missing = dataclasses.replace(seen, q=seen.q[:, :, :3], q_pos=seen.q_pos[:, :3])
    with pytest.raises(ValueError, match="rehearses, and 3 were observed"):
        list(policy.compress([(entries, missing)], Budget.parse(5), [N]))
