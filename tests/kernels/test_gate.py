"""Gates of a merge against plain loops."""

import pytest
import torch

from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.gate import logit_spread, worth_merging
from kvpass.kernels.group import cluster_scores
from kvpass.kernels.score import attention_blocks

N, DIM, HEADS, GROUP, QUERIES = 9, 4, 2, 2, 5


@pytest.fixture
def layer():
    """Entries with votes, queries of which one slot is unused, and pairs (dropped, target)."""
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, HEADS, N, DIM, generator=g, dtype=torch.float64) for _ in range(2))
    tokens = torch.randint(1, 5, (1, HEADS, N), generator=g, dtype=torch.int32)
    pos = torch.arange(N, dtype=torch.int32).expand(1, HEADS, N)
    q = torch.randn(1, HEADS * GROUP, QUERIES, DIM, generator=g, dtype=torch.float64)
    q_pos = torch.arange(N - QUERIES, N, dtype=torch.int32)[None].clone()
    q_pos[0, 1] = -1
    entries = Entries(k, v, tokens.double().log(), tokens, pos)
    return entries, Observation(q, q_pos, 0.5), torch.tensor([[[1, 4, 6]] * HEADS]), torch.tensor([[[0, 2, 8]] * HEADS])


def rows_of(seen, h):
    """The used queries of a group, scaled."""
    used = seen.q_pos[0] >= 0
    return seen.scale * seen.q[0, h * GROUP : (h + 1) * GROUP][:, used].reshape(-1, DIM)


def test_logit_spread(layer):
    """The closed form is the standard deviation of the logit difference over the used queries."""
    entries, seen, dropped, target = layer
    got = logit_spread(entries, seen, dropped, target)
    for h in range(HEADS):
        for n, (e, c) in enumerate(zip(dropped[0, h], target[0, h], strict=True)):
            apart = rows_of(seen, h) @ (entries.k[0, h, e] - entries.k[0, h, c])
            torch.testing.assert_close(got[0, h, n], apart.std(unbiased=False))


@pytest.mark.parametrize("block", [1 << 20, 40])
def test_worth_merging(layer, block, monkeypatch):
    """Merge where the residual of the best shared value is below the error of losing the entry, by loops."""
    monkeypatch.setattr("kvpass.kernels.score.BLOCK", block)
    entries, seen, _, _ = layer
    every = torch.arange(N).expand(1, HEADS, N)
    verdicts = []
    for shift in range(1, N):
        target = (every + shift) % N
        got = worth_merging(entries, attention_blocks(entries, seen, causal=False), every, target)
        for h in range(HEADS):
            a = (rows_of(seen, h) @ entries.k[0, h].T + entries.log_votes[0, h]).softmax(-1)
            v = entries.v[0, h]
            output = a @ v
            for e in range(N):
                c = int(target[0, h, e])
                pair = a[:, e] + a[:, c]
                share = a[:, e] / pair
                best = (pair**2 * share).sum() / (pair**2).sum()
                merging = (pair**2 * (share - best) ** 2).sum() * (v[e] - v[c]).square().sum()
                losing = ((a[:, e] / (1 - a[:, e])) ** 2 * (v[e] - output).square().sum(-1)).sum()
                assert got[0, h, e] == (merging < losing)
                verdicts.append(bool(merging < losing))
    assert any(verdicts) and not all(verdicts)


@pytest.mark.parametrize("merges", [0, 2, 9])
@pytest.mark.parametrize("threshold", [-1.0, 0.3])
def test_cluster_scores(layer, merges, threshold, monkeypatch):
    """Scores gather at the root of each chain of most similar betters; the most similar links count."""
    monkeypatch.setattr("kvpass.kernels.group.SIMILARITIES", 40)
    entries, *_ = layer
    g = torch.Generator().manual_seed(1)
    score = torch.randint(0, 4, (1, HEADS, N), generator=g).float()
    free = torch.rand(1, HEADS, N, generator=g) < 0.8
    got = cluster_scores(entries, score, free, torch.full((1, HEADS), merges), threshold=threshold)
    for h in range(HEADS):
        unit = torch.nn.functional.normalize(entries.k[0, h], dim=-1)
        own = score[0, h].tolist()
        links = []
        for i in (n for n in range(N) if free[0, h, n]):
            better = [j for j in range(N) if free[0, h, j] and (-own[j], j) < (-own[i], i)]
            best = max(((float(unit[i] @ unit[j]), -j) for j in better), default=(-2.0, 0))
            if best[0] >= threshold and better:
                links.append((-best[0], i, -best[1]))
        goes = {i: j for _, i, j in sorted(links)[:merges]}
        expected = dict(enumerate(own))
        for i in sorted(goes, key=lambda n: (own[n], -n)):  # worst first, so that sums travel up
            expected[goes[i]] += expected[i]
            expected[i] = -torch.inf
        assert got[0, h].tolist() == [expected[n] for n in range(N)]
