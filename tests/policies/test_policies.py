"""Compression policies against plain loops on tiny caches."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass.budget import Budget
from kvpass.kernels.merge import KEY_MODES
from kvpass.kernels.score import attention_mass, attention_rms, one_head_each, recent_queries
from kvpass.policies import (
    D2O,
    H2O,
    POLICIES,
    TOVA,
    AttentionMatching,
    CaM,
    DuoAttention,
    ExpectedAttention,
    HeadKV,
    KeepKV,
    KVMerger,
    KVzip,
    Oracle,
    Policy,
    PyramidKV,
    Random,
    Reference,
    SnapKV,
    Streaming,
    Unified,
    get,
)
from kvpass.policies.allocate import ALLOCATORS
from kvpass.policies.reference import spread
from tests.policies.tiny import DIM, GROUP, HEADS, choose, kept, layers_of

SMALL = [
    Streaming(window=4, sinks=2),
    SnapKV(window=4, sinks=2, pool=3),
    SnapKV(window=4, sinks=2, pool=3, allocator="layer"),
    SnapKV(window=4, sinks=2, pool=3, allocator="global"),
    Reference(window=4, sinks=2, references=9),
    SnapKV(window=4, sinks=2, pool=3, allocator="blend"),
    PyramidKV(window=2, sinks=1, pool=3, beta=4),
    H2O(window=4),
    TOVA(),
    ExpectedAttention(sinks=2, references=9, future=5),
    DuoAttention(sinks=2, recent=6, references=9, span=7),
    HeadKV(window=2, sinks=1, pool=3, needles=3, span=3),
    KVzip(sinks=2, chunk=11, lead=2, instruction=(1, 1)),
    Random(),
    Oracle(),
    KeepKV(window=4, sinks=2, references=9),
    Unified(window=4, sinks=2, references=9),
    KeepKV(window=4, sinks=2, references=9, allocator="global", key_mode="fixed"),
    KeepKV(window=4, sinks=2, references=0, value_fit=False, key_mode="zip"),
    KeepKV(selector=SnapKV(window=4, sinks=2, pool=3, allocator="layer"), references=9),
    KeepKV(window=4, sinks=2, references=9, key_mode="min_norm", gate="sigma", orphan="absorb"),
    KeepKV(window=4, sinks=2, references=9, gate="cost", order="merge_first", key_frame="unrotated"),
    AttentionMatching(window=4, sinks=2, references=9),
    AttentionMatching(window=4, sinks=2, references=9, keys="omp", rounds=3, allocator="layer"),
    AttentionMatching(window=4, sinks=2, references=12, judges="rehearsal"),
    CaM(sinks=2, spread=3),
    CaM(sinks=2, spread=3, keep="streaming", deterministic=True, votes=True),
    D2O(sinks=2),
    D2O(sinks=2, mode="code", votes=True),
    KVMerger(),
    KVMerger(allocator="layer", least=0.75, votes=True),
]
MERGING = KeepKV(window=4, sinks=2, references=9)
names = [f"{p.name}-{p.allocator}-{getattr(p, 'key_mode', '')}" for p in SMALL]


def test_registry():
    """Names and instances resolve; an unknown name is refused with the known ones."""
    assert all(isinstance(get(name), Policy) for name in POLICIES)
    policy = SnapKV(window=7)
    assert get(policy) is policy
    with pytest.raises(ValueError, match=r"unknown policy 'snap'; known: streaming, snapkv.*keepkv"):
        get("snap")


def test_frozen():
    """A policy is a value: equal when its fields are, hashable, not assignable."""
    assert KeepKV() == KeepKV() and len({SnapKV(), SnapKV(), SnapKV(window=8)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        SnapKV().window = 3


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SnapKV(window=0), "window"),
        (lambda: SnapKV(sinks=-1), "sinks"),
        (lambda: SnapKV(pool=4), "pool"),
        (lambda: SnapKV(allocator="heads"), "uniform, layer, blend, global"),
        (lambda: SnapKV(floor=1.5), "floor"),
        (lambda: Reference(references=0), "references"),
        (lambda: KeepKV(key_mode="zipp"), "fixed, convex"),
        (lambda: Reference(recency=0.5), "recency"),
        (lambda: KeepKV(threshold=1.5), "threshold"),
        (lambda: KeepKV(negligible=1.0), "negligible"),
        (lambda: KeepKV(max_votes=0), "max_votes"),
        (lambda: KeepKV(gate="sigm"), "cos, sigma, cost"),
        (lambda: KeepKV(order="first"), "evict_first, merge_first"),
        (lambda: KeepKV(orphan="keep"), "drop, absorb"),
        (lambda: KeepKV(sigma=-1.0), "sigma"),
        (lambda: KeepKV(window=8, selector=SnapKV(window=16)), "contradicts"),
    ],
)
def test_refuses(make, message):
    """A field that cannot be meant is refused at construction."""
    with pytest.raises(ValueError, match=message):
        make()


@given(st.integers(1, 300), st.integers(1, 50), st.integers(1, 40))
def test_spread(length, references, window):
    """Reference positions are sorted, unique, inside the prompt, and hold the whole window."""
    at = spread(length, references, window)
    assert (at.diff() > 0).all() and at.min() >= 0 and at.max() == length - 1
    assert set(range(max(0, length - window), length)) <= set(at.tolist())
    assert len(at) <= references + window


@pytest.mark.parametrize("policy", SMALL, ids=names)
@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1.0, 1, 5, 9, 40])
def test_totals_are_exact(policy, value):
    """Every sequence stores exactly what its budget says, in rows ordered by position."""
    lengths = [23, 9, 40]
    budget = Budget.parse(value)
    out = list(policy.compress(layers_of(policy, lengths), budget, lengths))
    stored = sum(e.lengths.sum(-1) for e in out)
    assert stored.tolist() == budget.total(lengths, 3 * HEADS)
    for e in out:
        assert e.k.shape[2] == e.lengths.max()
        assert e.k.isfinite().all() and e.v.isfinite().all()
        assert (e.lengths >= 1).all()
        for b in range(3):
            assert all(p == sorted(set(p)) for p in kept(e, b))
        assert e.log_votes[~e.valid].isneginf().all() and (e.pos[~e.valid] == -1).all()
        assert e.log_votes[e.valid].isfinite().all()


@pytest.mark.parametrize("policy", SMALL, ids=names)
@pytest.mark.parametrize("value", [0.3, 1])
def test_batch_equals_singles(policy, value):
    """A sequence in a padded batch keeps the positions, votes and values that it keeps alone."""
    lengths = [23, 9, 40]
    batch = list(policy.compress(layers_of(policy, lengths), Budget.parse(value), lengths))
    for b, n in enumerate(lengths):
        alone = list(policy.compress(layers_of(policy, [n]), Budget.parse(value), [n]))
        for together, single in zip(batch, alone, strict=True):
            assert kept(together, b) == kept(single, 0)
            used, own = together.valid[b], single.valid[0]
            for field in ("k", "v", "log_votes", "tokens"):
                x, y = getattr(together, field)[b][used], getattr(single, field)[0][own]
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", SMALL, ids=names)
def test_whole_budget_changes_nothing(policy):
    """Budget 1 returns every entry bit for bit."""
    layers = layers_of(policy, [23, 9])
    for (before, _), after in zip(layers, policy.compress(layers, Budget.parse(1.0), [23, 9]), strict=True):
        used = before.valid
        for field in ("k", "v", "log_votes", "tokens", "pos"):
            assert torch.equal(getattr(before, field)[used], getattr(after, field)[used])


@pytest.mark.parametrize("quota", range(1, 14))
def test_small_quotas_shrink_the_window_first(quota):
    """Newest token, then sinks, then the window from its new end, then the scores."""
    policy = Streaming(window=5, sinks=2)
    ((entries, seen),) = layers_of(policy, [12], count=1)
    keep = policy.select(policy.score(entries, seen), torch.full((1, HEADS), quota))
    assert keep[0, 0].nonzero().flatten().tolist() == choose(list(range(12)), quota, 12, 2, 5)


def test_ties_go_to_the_earlier_entry():
    """Equal scores are resolved by position."""
    policy = SnapKV(window=1, sinks=0)
    score = torch.tensor([[[1.0, 2.0, 1.0, 2.0, 1.0, torch.inf]]])
    assert policy.select(score, torch.tensor([[4]]))[0, 0].nonzero().flatten().tolist() == [0, 1, 3, 5]


def test_streaming():
    """Sinks and the most recent entries, whatever the queries."""
    policy = Streaming(window=4, sinks=3)
    (out,) = policy.compress(layers_of(policy, [30], count=1), Budget.parse(10), [30])
    assert kept(out, 0) == [[0, 1, 2, *range(23, 30)]] * HEADS
    assert policy.observe(30) == 0


def test_snapkv():
    """Window mass per group, window and sinks aside, max-pooled; the best entries of each row."""
    policy = SnapKV(window=4, sinks=2, pool=3)
    ((entries, seen),) = layers_of(policy, [25], count=1)
    (out,) = policy.compress([(entries, seen)], Budget.parse(11), [25])
    for h in range(HEADS):
        mass = torch.zeros(25, dtype=torch.float64)
        for g in range(GROUP):
            for w, at in enumerate(seen.q_pos[0].tolist()):
                logits = 0.5 * entries.k[0, h] @ seen.q[0, h * GROUP + g, w]
                logits[at + 1 :] = -torch.inf
                mass += logits.softmax(0)
        mass[:2] = mass[-4:] = 0
        pooled = [float(mass[max(0, n - 1) : n + 2].max()) for n in range(25)]
        assert kept(out, 0)[h] == choose(pooled, 11, 25, 2, 4)


def test_reference():
    """Root mean square weight over spread queries, none of them masked."""
    policy = Reference(window=3, sinks=1, references=6)
    ((entries, seen),) = layers_of(policy, [25], count=1)
    assert seen.q_pos[0].tolist() == [0, 5, 10, 14, 19, 22, 23, 24]
    (out,) = policy.compress([(entries, seen)], Budget.parse(9), [25])
    for h in range(HEADS):
        q = seen.q[0, h * GROUP : (h + 1) * GROUP].reshape(-1, DIM)
        weight = (0.5 * q @ entries.k[0, h].T).softmax(-1)
        rms = weight.square().mean(0).sqrt().tolist()
        assert kept(out, 0)[h] == choose(rms, 9, 25, 1, 3)


def test_selector_uses_its_own_queries():
    """A window selector ignores the reference queries that the merge asked for."""
    plain, merging = SnapKV(window=4, sinks=2), KeepKV(selector=SnapKV(window=4, sinks=2), references=9)
    alone = list(plain.compress(layers_of(plain, [40]), Budget.parse(0.3), [40]))
    merged = list(merging.compress(layers_of(merging, [40]), Budget.parse(0.3), [40]))
    assert [kept(e, 0) for e in alone] == [kept(e, 0) for e in merged]
    assert (merging.window, merging.sinks) == (4, 2)


@pytest.mark.parametrize("allocator", ["layer", "global"])
@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
def test_competition(allocator, floor):
    """Pinned entries and the floor first, then the best scores of the layer or the model."""
    policy = SnapKV(window=2, sinks=1, allocator=allocator, floor=floor)
    layers = layers_of(policy, [30], count=3)
    scores = [policy.score(*pair) for pair in layers]
    counts = policy.allocate(scores, [61])
    rows = {(l, h): scores[l][0, h].tolist() for l in range(3) for h in range(HEADS)}
    even = {(l, h): 10 + (i < 1) for i, (l, h) in enumerate(rows)}
    pools = [[(l, h) for h in range(HEADS)] for l in range(3)] if allocator == "layer" else [list(rows)]
    for pool in pools:
        count = {row: max(3, int(even[row] * floor)) for row in pool}
        rest = sum(even[row] for row in pool) - sum(count.values())
        open_scores = sorted((-s, row) for row in pool for s in sorted(rows[row], reverse=True)[count[row] :])
        for _, row in open_scores[:rest]:
            count[row] += 1
        for l, h in pool:
            assert counts[l][0, h] == count[l, h]
    if floor == 1.0:
        assert all(counts[l][0, h] == even[l, h] for l, h in rows)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_allocators_meet_any_total(data):
    """Rows of any length, any number of pinned entries, any total: sums are exact and no row is exceeded."""
    allocator = ALLOCATORS[data.draw(st.sampled_from(list(ALLOCATORS)))]
    batch, layers, slots = (data.draw(st.integers(1, n)) for n in (3, 3, 9))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    scores = []
    for _ in range(layers):
        score = torch.rand(batch, HEADS, slots, generator=g)
        score[torch.rand(score.shape, generator=g) < 0.2] = torch.inf
        score[torch.rand(score.shape, generator=g) < 0.3] = -torch.inf
        scores.append(score)
    available = [(~s.isneginf()).sum(-1) for s in scores]
    totals = data.draw(st.lists(st.integers(0, layers * HEADS * slots), min_size=batch, max_size=batch))
    counts = allocator(scores, totals, floor=data.draw(st.sampled_from([0.0, 0.2, 1.0])))
    room = sum(a.sum(-1) for a in available)
    assert sum(c.sum(-1) for c in counts).tolist() == torch.minimum(torch.tensor(totals), room).tolist()
    assert all((c <= a).all() and (c >= 0).all() for c, a in zip(counts, available, strict=True))


@pytest.mark.parametrize("key_mode", KEY_MODES)
def test_votes_are_conserved(key_mode):
    """With every dropped entry merged, the rows stand for exactly the tokens of the prompt."""
    policy = KeepKV(window=3, sinks=1, references=8, threshold=-1.0, negligible=0.0, key_mode=key_mode)
    lengths = [30, 18]
    out = list(policy.compress(layers_of(policy, lengths), Budget.parse(0.4), lengths))
    for e in out:
        assert e.tokens.sum(-1).tolist() == [[n] * HEADS for n in lengths]
    capped = dataclasses.replace(policy, selector=None, max_votes=3)
    for e in capped.compress(layers_of(capped, lengths), Budget.parse(0.4), lengths):
        assert e.tokens.max() <= 3


def test_pinned_entries_stay_exact():
    """Sinks and the recent window neither move nor collect votes."""
    policy = KeepKV(window=5, sinks=2, references=8, threshold=-1.0)
    ((entries, seen),) = layers_of(policy, [30], count=1)
    (out,) = policy.compress([(entries, seen)], Budget.parse(12), [30])
    for ends in (slice(0, 2), slice(-5, None)):
        for field in ("k", "v", "tokens", "log_votes"):
            assert torch.equal(getattr(out, field)[:, :, ends], getattr(entries, field)[:, :, ends])


def test_second_compression():
    """Entries that already carry votes are judged by them, merged again, and stay ordered."""
    policy = KeepKV(window=4, sinks=2, references=9, threshold=-1.0, negligible=0.0)
    layers = layers_of(policy, [40, 25])
    first = list(policy.compress(layers, Budget.parse(0.5), [40, 25]))
    again = [(e, seen) for e, (_, seen) in zip(first, layers, strict=True)]
    second = list(policy.compress(again, Budget.parse(0.3), [40, 25]))
    assert sum(e.lengths.sum(-1) for e in second).tolist() == Budget.parse(0.3).total([40, 25], 3 * HEADS)
    for e in second:
        assert e.tokens.sum(-1).tolist() == [[40] * HEADS, [25] * HEADS]
        assert all(p == sorted(p) for b in range(2) for p in kept(e, b))
    same = list(
        policy.compress([(e, s) for e, (_, s) in zip(second, layers, strict=True)], Budget.parse(1.0), [40, 25])
    )
    for before, after in zip(second, same, strict=True):
        assert torch.equal(before.k, after.k) and torch.equal(before.log_votes, after.log_votes)


@pytest.mark.parametrize("fit", [False, True])
def test_merging_beats_eviction(fit):
    """At the queries that judged, merging is closer to the full cache's output than eviction."""
    merging = KeepKV(window=4, sinks=2, references=20, threshold=0.0, value_fit=fit)
    evicting = Reference(window=4, sinks=2, references=20)
    error = {}
    for policy in (merging, evicting):
        layers = layers_of(policy, [60])
        total = 0.0
        for (entries, seen), out in zip(layers, policy.compress(layers, Budget.parse(0.3), [60]), strict=True):
            total += (attend(out, seen) - attend(entries, seen)).square().sum()
        error[policy.name] = float(total)
    assert error["keepkv"] < 0.7 * error["reference"]


def attend(entries, seen):
    """[B, Hq, W, Dv] attention output, unmasked."""
    k, v, m = (x.double().repeat_interleave(GROUP, 1) for x in (entries.k, entries.v, entries.log_votes))
    return (seen.scale * seen.q @ k.transpose(2, 3) + m.unsqueeze(2)).softmax(-1) @ v


@given(st.integers(1, 300), st.integers(1, 50), st.integers(1, 40))
def test_spread_crowds_towards_the_end(length, references, window):
    """With recency, positions stay unique and in the prompt, and the later half holds no fewer."""
    at = spread(length, references, window, 3.0)
    assert (at.diff() > 0).all() and at.min() >= 0 and at.max() == length - 1
    assert 2 * (at >= (length - 1) / 2).sum() >= len(at)
    assert set(range(max(0, length - window), length)) <= set(at.tolist())


@pytest.mark.parametrize("policy", [MERGING, dataclasses.replace(MERGING, selector=None, round_robin=False)])
def test_shared_attention_changes_nothing(policy):
    """Scoring and merging from one pass over the keys gives what scoring and then merging gives."""
    policy = dataclasses.replace(policy, selector=None, window=2)  # small enough for every quota to hold
    lengths = [40, 23]
    layers = layers_of(policy, lengths)
    together = list(policy.compress(layers, Budget.parse(0.3), lengths))
    apart = list(Policy.compress(policy, layers, Budget.parse(0.3), lengths))
    for a, b in zip(together, apart, strict=True):
        assert all(torch.equal(getattr(a, f), getattr(b, f)) for f in ("k", "v", "log_votes", "tokens", "pos"))


@pytest.mark.parametrize("quota, window", [(2, 1), (18, 9), (40, 16), (96, 16), (600, 100)])
def test_window_follows_the_quota(quota, window):
    """The exact recent window is at most half of a small row, and a sixth of a large one."""
    assert KeepKV()._window(quota) == window


def test_round_robin_scores_one_head_a_position():
    """Root mean square over one query per position and group, heads in turn."""
    policy = Reference(window=3, sinks=1, references=6, round_robin=True)
    ((entries, seen),) = layers_of(policy, [25], count=1)
    score = policy.score(entries, seen)
    for h in range(HEADS):
        q = torch.stack([seen.q[0, h * GROUP + w % GROUP, w] for w in range(seen.q.shape[2])])
        rms = (0.5 * q @ entries.k[0, h].T).softmax(-1).square().mean(0).sqrt()
        torch.testing.assert_close(score[0, h, 1:-3], rms[1:-3].float())


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_negligible_entries_are_lost(share):
    """Dropped entries far below the mean weight join nobody; the others all do."""
    policy = KeepKV(window=4, sinks=2, references=9, threshold=-1.0, negligible=share)
    ((entries, seen),) = layers_of(policy, [60], count=1)
    (out,) = policy.compress([(entries, seen)], Budget.parse(12), [60])
    rms = attention_rms(entries, one_head_each(seen, HEADS))
    for h in range(HEADS):
        dropped = [n for n in range(2, 56) if n not in kept(out, 0)[h]]
        weight = rms[0, h, dropped]
        worth = weight >= share * weight.mean()
        assert out.tokens[0, h].sum() == 12 + worth.sum()
        assert weight[~worth].sum() <= share * weight.sum()


def test_lengths_yield_in_order():
    """Layers come out one by one: a layer's result is there before the next is merged."""
    policy = KeepKV(window=4, sinks=2, references=9)
    layers = layers_of(policy, [30])
    result = policy.compress(layers, Budget.parse(0.3), [30])
    first = next(result)
    assert first.k.shape[1] == HEADS and len(list(result)) == 2


def test_scores_are_the_kernels():
    """Selectors add pinning to the kernels' scores and nothing else."""
    policy = SnapKV(window=4, sinks=2, pool=1)
    ((entries, seen),) = layers_of(policy, [30], count=1)
    mass = attention_mass(entries, recent_queries(seen, 4)).float()
    score = policy.score(entries, seen)
    assert score[..., :2].isposinf().all() and score[..., -4:].isposinf().all()
    assert torch.equal(score[..., 2:-4], mass[..., 2:-4])
    policy = Reference(window=4, sinks=2, references=9)
    ((entries, seen),) = layers_of(policy, [30], count=1)
    assert torch.equal(policy.score(entries, seen)[..., 2:-4], attention_rms(entries, seen).float()[..., 2:-4])


def test_absorbed_orphans():
    """With orphans absorbed every entry votes and those too unlike their target do not move its key."""
    fields = {"window": 3, "sinks": 1, "references": 8, "threshold": 0.6, "negligible": 0.0, "value_fit": False}
    ((entries, seen),) = layers_of(KeepKV(**fields), [30], count=1)
    drops, absorbs = (
        next(iter(KeepKV(**fields, orphan=o).compress([(entries, seen)], Budget.parse(12), [30])))
        for o in ("drop", "absorb")
    )
    assert drops.tokens.sum(-1).lt(30).all() and absorbs.tokens.sum(-1).eq(30).all()
    # Members that move a key are the same in both, and weigh in the same proportion.
    same = (drops.k - absorbs.k).abs().amax(-1) < 0.3
    assert same[absorbs.tokens == 1].all() and (absorbs.tokens > drops.tokens).any()
    alone = drops.tokens == 1
    assert torch.equal(absorbs.k[alone], entries.take(*_index(kept(drops, 0))).k[alone])


def _index(rows):
    index = torch.tensor([rows])
    return index, torch.ones_like(index, dtype=torch.bool)


def test_merging_first_keeps_dissimilar_entries():
    """Where two entries say the same, one place goes to the next best instead, and the pair is one entry."""
    policy = KeepKV(window=1, sinks=0, references=8, selector=SnapKV(window=1, sinks=0, pool=1))
    ((entries, seen),) = layers_of(policy, [8], count=1)
    k = torch.eye(4, dtype=torch.float64)[[0, 1, 2, 3, 0, 1, 2, 3]].expand(1, HEADS, -1, -1).clone()
    k[0, :, 4:] *= torch.tensor([[2.0], [1.0], [1.0], [1.0]])
    entries = dataclasses.replace(entries, k=k)
    seen = dataclasses.replace(seen, q=torch.tensor([6.0, 3.0, 2.0, 1.0]).double().expand_as(seen.q))
    held = {}
    for order in ("evict_first", "merge_first"):
        ordered = dataclasses.replace(policy, order=order, threshold=0.9)
        (out,) = ordered.compress([(entries, seen)], Budget.parse(3), [8])
        held[order] = kept(out, 0)[0]
    assert held == {"evict_first": [0, 4, 7], "merge_first": [1, 4, 7]}
