"""The auction of ``unified`` against plain loops; its budget, batch and bit-exactness are in test_policies."""

import pytest
import torch

from kvpass.kernels.score import attention_rms, one_head_each
from kvpass.policies import KeepKV, Unified
from tests.policies.tiny import HEADS, choose, layers_of


@pytest.mark.parametrize("bidders", [100.0, 1.0])
def test_auction_equals_plain_loops(bidders):
    """Settled entries by weight; then, over the layer, the largest share times what the nearest kept key misses."""
    policy = Unified(window=4, sinks=2, references=20, asked=0.0, settled=0.5, bidders=bidders)
    ((entries, seen),) = layers_of(policy, [60], count=1)
    weight = attention_rms(entries, one_head_each(seen, HEADS))
    keep = policy.keep(entries, weight, torch.tensor([[20, 20]]), torch.tensor([[[4]]]))
    bids, expected = [], []
    for h in range(HEADS):
        fetched = (entries.v[0, h] - entries.v[0, h].mean(0)).norm(dim=-1)
        score = (weight[0, h] * fetched).tolist()
        first = choose(score, 10, 60, 2, 4)
        expected += [(h, n) for n in first]
        middle = [n for n in first if 2 <= n < 56]
        key = torch.nn.functional.normalize(entries.k[0, h], dim=-1)
        whole = sum(score[2:56])
        loose = sorted((n for n in range(60) if n not in first), key=lambda n: -score[n])
        for n in loose[: int(10 * bidders)]:
            similar = max(float(key[n] @ key[m]) for m in middle)
            bids.append((score[n] / whole * (1 - min(1, max(0, similar)) ** 2), h, n))
    expected += [(h, n) for _, h, n in sorted(bids, reverse=True)[:20]]
    assert sorted(map(list, expected)) == keep[0].nonzero().tolist()
    assert keep[0].sum(-1).min() >= 10


def test_heads_compete():
    """A head whose keys are all alike gives its lots to one whose keys differ."""
    policy = Unified(window=4, sinks=2, references=20)
    entries, _ = layers_of(policy, [80], count=1)[0]
    entries.k[:, 0] = entries.k[:, 0, :1]
    keep = policy.keep(
        entries, torch.ones(1, HEADS, 80, dtype=torch.float64), torch.tensor([[30, 30]]), torch.tensor([[[4]]])
    )
    assert keep[0].sum(-1).tolist() == [21, 39]


@pytest.mark.parametrize(
    "kwargs", [{"settled": 1.1}, {"bidders": 0.5}, {"allocator": "layer"}, {"references": 0}, {"selector": KeepKV()}]
)
def test_refuses(kwargs):
    """What the auction has no say in, or cannot mean, is refused."""
    with pytest.raises(ValueError, match=r"settled|bidders|unified"):
        Unified(**kwargs)
