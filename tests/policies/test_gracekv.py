"""GraceKV against plain loops, and what must hold for any prompt and budget."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass.budget import Budget
from kvpass.kernels.auction import STORED
from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.flow import floor_candidates
from kvpass.kernels.frame import Frame
from kvpass.policies import GraceKV, SnapKV
from kvpass.policies.grace_build import stored
from kvpass.policies.grace_context import read
from tests.policies.grace_oracle import Row, allocate, build
from tests.policies.tiny import DIM, GROUP, HEADS, kept, layers_of

FRAME = Frame(torch.arange(DIM // 2), torch.arange(DIM // 2) + DIM // 2, torch.tensor([0.1, 0.01]).double())
SMALL = GraceKV(window=4, sinks=2, references=300, question=6, candidates=4)


def turning(policy, lengths, **kwargs):
    """``layers_of`` whose keys turn with their position, whose heads have a projection."""
    out = torch.randn(HEADS * GROUP, DIM, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return [
        (entries, dataclasses.replace(seen, frame=FRAME, out=out, turns=True))
        for entries, seen in layers_of(policy, lengths, **kwargs)
    ]


def market_of(policy, layers, total):
    """What the auction bought for one sequence."""
    return policy._plan(layers, total)


@pytest.mark.parametrize("multiplicity", ["coherence", "votes"])
@pytest.mark.parametrize("total, reserved", [(60, 0.6), (150, 0.6), (300, 0.0)])
def test_frontier_equals_plain_loops(multiplicity, total, reserved):
    """Same stored nodes, same keys, values and log-votes as the method in plain loops builds from whole trees."""
    length, window = 110, 4
    policy = dataclasses.replace(SMALL, multiplicity=multiplicity, reserved=reserved)
    layers = turning(policy, [length], count=2)
    market = market_of(policy, layers, total)
    context = read(layers, market.context.exact, question=6, hop_count=2, hop_share=0.3, curved=True, weigh_heads=True)
    edges, first = context.edges.tolist(), 2
    assert edges[0] == first and edges[-1] == length - window
    held = torch.zeros(4, length, dtype=torch.bool)
    held[:, first : length - window] = True
    floor = [x.numpy() - first for x in floor_candidates(context.relevance, held)]
    left = total - 4 * (first + window)
    cap, count = int(reserved * left), sum(map(len, floor))
    if count > cap:
        floor = [x[: max(1, len(x) * cap // count)] for x in floor]
    floor = floor if cap else [[]] * 4
    rows, trees = [], []
    at = np.arange(first, length - window)
    turns = context.turns.numpy()[at]
    for r in range(4):
        entries, seen = layers[r // 2]
        head = r % 2 * GROUP + np.arange(len(context.probes)) % GROUP
        q_pos = seen.q_pos[0, context.probes].numpy()
        rows.append(
            Row(
                entries.k[0, r % 2, at].numpy(),
                entries.v[0, r % 2, at].numpy(),
                context.relevance[r, at].numpy(),
                at,
                0.5 * seen.q[0, head, context.probes].numpy(),
                np.clip(q_pos + 1 - first, 0, len(at)),
                lambda x, p: FRAME.turn(torch.from_numpy(x)[None], torch.tensor([int(p)]))[0].numpy(),
                multiplicity,
            )
        )
        slots = pairwise(edges)
        trees.append([build(rows[r], a - first, b - first, turns, floor[r], 4) for a, b in slots])
    wanted, used = allocate(trees, rows, context.sensitivity.numpy(), floor, left, reserved)
    forest = market.forest
    own = market.state == STORED
    assert used == left and own.sum() == left
    assert set(zip(forest.row[own], forest.start[own], forest.stop[own], strict=True)) == wanted
    for index in range(2):
        out = stored(market, layers[index], index)
        for h in range(2):
            nodes = sorted((a, b) for r, a, b in wanted if r == index * 2 + h)
            middle = slice(first, first + len(nodes))
            want = [rows[index * 2 + h].prototype(a, b) for a, b in nodes]
            for field, part in (("k", 0), ("v", 1), ("log_votes", 2)):
                got = getattr(out, field)[0, h, middle].double().numpy()
                np.testing.assert_allclose(got, np.array([x[part] for x in want]), rtol=1e-5, atol=1e-5)
            assert out.tokens[0, h, middle].tolist() == [b - a for a, b in nodes]


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_any_prompt_any_budget(data):
    """The budget is used to the last entry; exact entries are the original's bits; no token is stored twice."""
    lengths = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=2))
    value = data.draw(st.one_of(st.floats(0.01, 1.0), st.integers(1, 80)))
    policy = dataclasses.replace(
        SMALL,
        multiplicity=data.draw(st.sampled_from(["coherence", "votes", "calibrated"])),
        key_frame=data.draw(st.sampled_from(["unrotated", "cached"])),
        tree=data.draw(st.booleans()),
        across=data.draw(st.booleans()),
        curved=data.draw(st.booleans()),
        hops=data.draw(st.integers(0, 2)),
        reserved=data.draw(st.sampled_from([0.0, 0.6, 1.0])),
    )
    layers = turning(policy, lengths, count=2, seed=data.draw(st.integers(0, 9)))
    if data.draw(st.booleans()):  # constant inputs
        layers = [(dataclasses.replace(e, k=torch.ones_like(e.k), v=torch.ones_like(e.v)), s) for e, s in layers]
    budget = Budget.parse(value)
    out = list(policy.compress(layers, budget, lengths))
    assert sum(e.lengths.sum(-1) for e in out).tolist() == budget.total(lengths, 2 * HEADS)
    for (before, _), after in zip(layers, out, strict=True):
        assert after.k.isfinite().all() and after.v.isfinite().all()
        for b, length in enumerate(lengths):
            for h, positions in enumerate(kept(after, b)):
                assert positions == sorted(set(positions)) and positions[-1] == length - 1
                assert after.tokens[b, h].sum() <= length
                for slot, pos in enumerate(positions):
                    if after.tokens[b, h, slot] == 1:
                        assert torch.equal(after.k[b, h, slot], before.k[b, h, pos])
                        assert torch.equal(after.v[b, h, slot], before.v[b, h, pos])
                        assert after.log_votes[b, h, slot] == 0


def test_whole_budget_changes_nothing():
    """Budget 1 returns every entry bit for bit."""
    layers = turning(SMALL, [120, 33])
    for (before, _), after in zip(layers, SMALL.compress(layers, Budget.parse(1.0), [120, 33]), strict=True):
        used = before.valid
        for field in ("k", "v", "log_votes", "tokens", "pos"):
            assert torch.equal(getattr(before, field)[used], getattr(after, field)[used])


def test_batch_equals_singles_and_repeats():
    """A sequence keeps in a padded batch what it keeps alone, bit for bit, every time."""
    lengths = [120, 9, 70]
    batch = list(SMALL.compress(turning(SMALL, lengths), Budget.parse(0.3), lengths))
    for b, n in enumerate(lengths):
        alone = list(SMALL.compress(turning(SMALL, [n]), Budget.parse(0.3), [n]))
        for together, single in zip(batch, alone, strict=True):
            assert kept(together, b) == kept(single, 0)
            for field in ("k", "v", "log_votes", "tokens"):
                x, y = getattr(together, field)[b][together.valid[b]], getattr(single, field)[0][single.valid[0]]
                torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_splits_telescope_and_conserve_relevance():
    """A node's children tile it and share out its relevance; a whole tree costs what its slot has entries."""
    layers = turning(SMALL, [150], count=2)
    market = market_of(SMALL, layers, 300)
    forest, worth = market.forest, market.worth
    for node in np.flatnonzero(forest.count):
        child = np.arange(forest.first[node], forest.first[node] + forest.count[node])
        edges = [forest.start[node], *forest.stop[child]]
        assert edges[-1] == forest.stop[node] and forest.start[child].tolist() == edges[:-1]
        value = worth[forest.row, forest.stop] - worth[forest.row, forest.start]
        assert value[child].sum() == pytest.approx(value[node], rel=1e-12, abs=1e-15)
    path_cost = np.where(market.state == 2, forest.count - 1, 0).sum()
    roots = ((forest.parent < 0) & (market.state > 0)).sum()
    assert roots + path_cost == (market.state == STORED).sum()


def test_floor_tokens_are_exact_once():
    """With the whole budget reserved, the most needed token of every row is stored alone."""
    policy = dataclasses.replace(SMALL, reserved=1.0)
    layers = turning(policy, [150], count=2)
    out = list(policy.compress(layers, Budget.parse(60), [150]))
    market = market_of(policy, layers, 240)
    held = torch.zeros(4, 150, dtype=torch.bool)
    held[:, 2:146] = True
    for r, tokens in enumerate(floor_candidates(market.context.relevance, held)):
        at = kept(out[r // 2], 0)[r % 2].index(int(tokens[0]))
        assert out[r // 2].tokens[0, r % 2, at] == 1


def test_second_compression():
    """Entries with votes, in rows of different lengths, are compressed again to the budget."""
    layers = turning(SMALL, [150, 60])
    first = list(SMALL.compress(layers, Budget.parse(0.5), [150, 60]))
    again = [(e, seen) for e, (_, seen) in zip(first, layers, strict=True)]
    second = list(SMALL.compress(again, Budget.parse(0.2), [150, 60]))
    assert sum(e.lengths.sum(-1) for e in second).tolist() == Budget.parse(0.2).total([150, 60], 3 * HEADS)
    for before, after in zip(first, second, strict=True):
        assert (after.tokens.sum(-1) <= before.tokens.sum(-1)).all()


def two_hops():
    """640 tokens where the question at the end attends to token 100, token 100 to token 40, and nothing else to token
    40; every other key is small."""
    length, dim = 640, 16
    g = torch.Generator().manual_seed(0)
    layers = []
    for _ in range(4):
        k = 0.3 * torch.randn(1, 1, length, dim, generator=g)
        q = 0.3 * torch.randn(1, 1, length, dim, generator=g)
        v = torch.randn(1, 1, length, dim, generator=g)
        k[0, 0, 100], k[0, 0, 40] = 0, 0
        k[0, 0, 100, 0] = k[0, 0, 40, 1] = 8.0
        q[0, 0, -8:, 0] = 8.0  # the question asks for 100
        q[0, 0, -8:, 1] = -8.0  # and not for 40
        q[0, 0, 100, 1] = 8.0  # which asks for 40
        layers.append((k, v, q))
    return layers, length


def test_answer_two_hops_away_stays_exact():
    """At 16x an entry that only the answer's clue attends to is stored alone; SnapKV loses it."""
    raw, length = two_hops()
    found = {}
    for policy in (GraceKV(window=4, question=8, references=640), SnapKV(window=4)):
        asked = policy.observe(length)
        at = torch.arange(length - asked, length) if isinstance(asked, int) else asked
        shape = (1, 1, length)
        pos = torch.arange(length, dtype=torch.int32).expand(shape)
        layers = [
            (
                Entries(k, v, torch.zeros(shape), torch.ones(shape, dtype=torch.int32), pos),
                Observation(q[:, :, at], at[None].int(), 0.25),
            )
            for k, v, q in raw
        ]
        out = list(policy.compress(layers, Budget.parse(1 / 16), [length]))
        exact = [int(p) for e in out for p, n in zip(e.pos[0, 0], e.tokens[0, 0], strict=True) if n == 1]
        found[policy.name] = exact.count(40)
    assert found["gracekv"] == 4 and found["snapkv"] == 0


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"multiplicity": "none"}, "coherence, votes, calibrated"),
        ({"key_frame": "post"}, "unrotated or cached"),
        ({"reserved": 1.5}, "reserved"),
        ({"hops": -1}, "hops"),
    ],
)
def test_refuses(kwargs, message):
    """A field that cannot be meant is refused at construction."""
    with pytest.raises(ValueError, match=message):
        GraceKV(**kwargs)
