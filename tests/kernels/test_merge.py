"""KeepKV merge numerics."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass.kernels import score as score_module
from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.group import Groups, group_by_similarity, nearest
from kvpass.kernels.merge import KEY_MODES, fit_values, merge
from kvpass.kernels.score import attention_blocks, compact
from tests.kernels.tiny import ADDITIVE, ASSIGN, attend, groups_of, observe, pair, plain, random


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("key_mode", ADDITIVE)
def test_storage_precision(dtype, bound, key_mode):
    """In storage precision the error is that of rounding the value: the log-vote answers for the rounded
    key."""
    entries = random(5, dtype=dtype)
    q = torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    seen = observe(q, 12)
    out = merge(entries, seen, *groups_of(ASSIGN, 12), key_mode=key_mode)
    assert out.k.dtype == out.v.dtype == dtype and out.log_votes.dtype == torch.float32
    full = attend(entries, q[0, 0], seen.scale)
    assert (attend(out, q[0, 0], seen.scale) - full).norm() / full.norm() < bound
    log_z = [
        (seen.scale * e.k[0, 0].double() @ q[0, 0, 0].double() + e.log_votes[0, 0]).logsumexp(0) for e in (out, entries)
    ]
    assert abs(log_z[0] - log_z[1]) < 1e-5


@pytest.mark.parametrize("shift", [-200.0, 200.0])
@pytest.mark.parametrize("key_mode", KEY_MODES)
def test_large_logits(shift, key_mode):
    """Logits moved by 200 in fp32: finite everywhere, and the additive log-votes do not move."""
    entries = random(2, dtype=torch.float32, votes=False)
    q = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(4))
    moved = Entries(entries.k.clone(), entries.v, entries.log_votes, entries.tokens, entries.pos)
    moved.k[..., 0], q[..., 0] = shift / 8**-0.5, 1.0
    entries.k[..., 0] = 0.0
    out = merge(moved, observe(q, 12), *groups_of(ASSIGN, 12), key_mode=key_mode)
    assert all(getattr(out, f).isfinite().all() for f in ("k", "v", "log_votes"))
    if key_mode in ("fixed", "convex"):
        still = merge(entries, observe(q, 12), *groups_of(ASSIGN, 12), key_mode=key_mode)
        torch.testing.assert_close(out.log_votes, still.log_votes, rtol=1e-3, atol=1e-3)


def test_group_far_below_the_softmax():
    """A group whose softmax weight underflows is still weighted by its logits, not by its votes alone."""
    k = torch.zeros(1, 1, 4, 2)
    k[0, 0, :, 0] = torch.tensor([300.0, -2.0, -1.0, 0.0])
    entries = plain(k, torch.eye(4)[None, None])
    seen = Observation(torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[3]], dtype=torch.int32), 1.0)
    out = merge(entries, seen, *groups_of({2: 1}, 4))
    expected = torch.tensor([-2.0, -1.0]).softmax(0)
    torch.testing.assert_close(out.v[0, 0, 1, 1:3], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("key_mode", ADDITIVE)
@pytest.mark.parametrize("below", [0.0, 30.0, 50.0, 90.0])
def test_faint_groups_of_several_queries(below, key_mode):
    """However far below the softmax a group lies, fp32 merges it as fp64 does."""
    exact = random(7, votes=False, heads=2)
    first = torch.zeros(1, 2, 12, 1, dtype=torch.float64)
    first[:, :, 0] = below
    exact = plain(torch.cat([exact.k, first], -1), exact.v)
    g = torch.Generator().manual_seed(3)
    q = torch.cat([torch.randn(1, 4, 3, 8, generator=g), torch.ones(1, 4, 3, 1)], -1).double()
    rough = plain(exact.k.float(), exact.v.float())
    kept, used, groups = groups_of(ASSIGN, 12)
    kept, used = kept.expand(1, 2, -1), used.expand(1, 2, -1)
    groups = Groups(
        torch.cat([groups.member, groups.member + 12]),
        torch.cat([groups.target, groups.target + kept.shape[-1]]),
        groups.merged.expand(1, 2, -1),
    )
    for causal in (True, False):
        want, got = (
            merge(
                e,
                Observation(x, observe(q, 12).q_pos, 1.0),
                kept,
                used,
                groups,
                causal=causal,
                key_mode=key_mode,
            )
            for e, x in ((exact, q), (rough, q.float()))
        )
        for field in ("k", "v", "log_votes"):
            torch.testing.assert_close(getattr(got, field), getattr(want, field).float(), rtol=2e-4, atol=2e-4)


def test_given_blocks():
    """Attention that is already there gives the same merge."""
    entries = random(13, votes=False)
    seen = observe(torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(2)).double(), 12)
    index, used, groups = groups_of(ASSIGN, 12)
    blocks = list(attention_blocks(entries, seen, causal=False))
    once, again = (
        merge(entries, seen, index, used, groups, causal=False, value_fit=True, blocks=b) for b in (None, blocks)
    )
    assert torch.equal(once.v, again.v) and torch.equal(once.log_votes, again.log_votes)


def shared_oracle(k, v, q, members, scale):
    """Loops in fp64: best shared weights, mean key and value and least-squares log-vote of one group."""
    rows = [scale * (k @ x) for x in q]
    mass = [sum(math.exp(l) for l in row.tolist()) for row in rows]
    a = [[math.exp(row[i]) / z for i in members] for row, z in zip(rows, mass, strict=True)]
    total = [sum(row) for row in a]
    norm = sum(t * t for t in total)
    pi = [sum(t * row[i] for t, row in zip(total, a, strict=True)) / norm for i in range(len(members))]
    key = sum(p * k[i] for p, i in zip(pi, members, strict=True))
    value = sum(p * v[i] for p, i in zip(pi, members, strict=True))
    w = [math.exp(scale * float(key @ x)) / z for x, z in zip(q, mass, strict=True)]
    vote = sum(x * t for x, t in zip(w, total, strict=True)) / sum(x * x for x in w)
    return key, value, math.log(vote), total, a


@pytest.mark.parametrize("block", [13, 1 << 20])
def test_shared_by_heads_and_queries(monkeypatch, block):
    """GQA, several queries: key, value and log-vote are the closed forms; no nearby value is better."""
    monkeypatch.setattr(score_module, "BLOCK", block)
    entries = random(11, votes=False)
    q = torch.randn(1, 3, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen = observe(q, 12)
    out = merge(entries, seen, *groups_of(ASSIGN, 12), causal=False)
    k, v, rows = entries.k[0, 0], entries.v[0, 0], q[0].reshape(-1, 8)
    for slot, members in ((1, [1, 3, 4, 5]), (3, [6, 7]), (4, [8, 9, 10])):
        key, value, vote, total, a = shared_oracle(k, v, rows, members, seen.scale)
        torch.testing.assert_close(out.k[0, 0, slot], key, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(out.v[0, 0, slot], value, rtol=1e-10, atol=1e-12)
        assert out.log_votes[0, 0, slot].item() == pytest.approx(vote, abs=1e-6)

        def residual(x, total=total, a=a, members=members):
            return sum(
                t * t * (x - sum(w / t * v[i] for w, i in zip(row, members, strict=True))).square().sum()
                for t, row in zip(total, a, strict=True)
            )

        best = residual(value)
        for axis in torch.eye(8, dtype=torch.float64):
            assert residual(value + 1e-3 * axis) > best < residual(value - 1e-3 * axis)


@pytest.mark.parametrize("key_mode", KEY_MODES)
def test_untouched_entries_are_bitwise(key_mode):
    """Retained entries without members keep every bit."""
    entries = random(6, dtype=torch.bfloat16)
    kept, used, groups = groups_of(ASSIGN, 12)
    q = torch.randn(1, 1, 2, 8, generator=torch.Generator().manual_seed(0))
    out, plain_take = (
        merge(entries, observe(q, 12), kept, used, groups, key_mode=key_mode),
        entries.take(kept, used),
    )
    alone = ~groups.merged
    for field in ("k", "v", "log_votes", "tokens", "pos"):
        assert torch.equal(getattr(out, field)[alone], getattr(plain_take, field)[alone])


def test_log_vote_limit():
    """A fixed key far from its members may not collect votes without bound."""
    entries, seen = pair(8.0, -8.0)
    free = merge(entries, seen, *groups_of({2: 1}, 3), key_mode="fixed")
    held = merge(entries, seen, *groups_of({2: 1}, 3), key_mode="fixed", excess=2.0)
    assert free.log_votes[0, 0, 1] > 15
    assert held.log_votes[0, 0, 1].item() == pytest.approx(math.log(2) + 2, abs=1e-6)


def test_without_queries_votes_weigh():
    """No usable query: members weigh by their votes and the votes add up."""
    entries = random(4)
    seen = Observation(torch.randn(1, 1, 2, 8, dtype=torch.float64), torch.full((1, 2), -1, dtype=torch.int32), 1.0)
    out = merge(entries, seen, *groups_of({2: 1}, 12))
    w = entries.tokens[0, 0, 1:3].double()
    torch.testing.assert_close(out.v[0, 0, 1], (w / w.sum()) @ entries.v[0, 0, 1:3], rtol=1e-6, atol=1e-7)
    assert out.log_votes[0, 0, 1].item() == pytest.approx(math.log(w.sum()), abs=1e-6)


def test_unknown_key_mode():
    """A misspelt key mode is refused."""
    entries, seen = pair(0.1, 0.2)
    with pytest.raises(ValueError, match="fixed, convex"):
        merge(entries, seen, *groups_of({2: 1}, 3), key_mode="zipp")


def greedy_groups(entries, b, h, kept, open_kept, dropped, threshold, max_votes):
    """Loops: target of each candidate, then each target's candidates by similarity until one does not fit."""
    unit = torch.nn.functional.normalize(entries.k[b, h], dim=-1)
    joined = {c: [] for c in kept}
    for e in dropped:
        options = [(float(unit[e] @ unit[c]), -i) for i, c in enumerate(kept) if c in open_kept]
        best = max(options, default=(-9, 0))
        if best[0] >= threshold:
            joined[kept[-best[1]]].append((-best[0], e))
    result = {}
    for c, candidates in joined.items():
        size = int(entries.tokens[b, h, c])
        for _, e in sorted(candidates):
            size += int(entries.tokens[b, h, e])
            if size > max_votes:
                break
            result[e] = c
    return result


@given(st.integers(0, 10_000), st.sampled_from([-1.0, 0.0, 0.4, 0.9]), st.sampled_from([1, 8, 64]))
@settings(max_examples=40, deadline=None)
def test_groups_match_plain_loops(seed, threshold, max_votes):
    """Targets, gate and cap as in plain loops; members and tokens are conserved."""
    entries = random(seed, slots=16, dim=3, batch=2, heads=2)
    keep = torch.rand(2, 2, 16, generator=torch.Generator().manual_seed(seed)) < 0.4
    kept, used = compact(keep)
    dropped, dropped_used = compact(~keep)
    open_kept = used & (kept > 1)
    groups = group_by_similarity(
        entries, kept, used, open_kept, dropped, dropped_used, threshold=threshold, max_votes=max_votes
    )
    found = {}
    for member, target in zip(groups.member.tolist(), groups.target.tolist(), strict=True):
        row, slot = divmod(target, kept.shape[-1])
        found.setdefault(row, {})[member % 16] = int(kept.reshape(4, -1)[row, slot])
        assert member // 16 == row
    assert (groups.target.diff() >= 0).all()
    for row in range(4):
        b, h = divmod(row, 2)
        stay = kept[b, h][used[b, h]].tolist()
        lost = dropped[b, h][dropped_used[b, h]].tolist()
        expected = greedy_groups(entries, b, h, stay, [c for c in stay if c > 1], lost, threshold, max_votes)
        expected |= {c: c for c in set(expected.values())}
        assert found.get(row, {}) == expected
    q = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    out = merge(entries, observe(q, 16), kept, used, groups)
    joined = groups.member[~torch.isin(groups.member, (kept + torch.arange(4).reshape(2, 2, 1) * 16)[used])]
    assert out.tokens.sum() == (entries.tokens * keep).sum() + entries.tokens.reshape(-1)[joined].sum()


def test_zero_key_resembles_nothing():
    """A zero key has cosine 0 and a row without targets none."""
    k = torch.randn(1, 1, 4, 3)
    k[0, 0, 2] = 0
    to, used = torch.tensor([[[0, 1]]]), torch.ones(1, 1, 2, dtype=torch.bool)
    similarity, _ = nearest(k, torch.tensor([[[2, 3]]]), to, used)
    assert similarity[0, 0, 0] == 0
    assert nearest(k, torch.tensor([[[2]]]), to, ~used)[0].isneginf().all()


@pytest.mark.parametrize("queries", [3, 40])
def test_value_fit(queries):
    """The fit is the closed form, leaves fixed entries alone, and ignores unused queries, in both systems."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, queries, generator=g, dtype=torch.float64)
    logits[1, 5] = -torch.inf
    value = torch.randn(2, 6, 4, generator=g, dtype=torch.float64)
    full = torch.randn(2, queries, 4, generator=g, dtype=torch.float64)
    free = torch.tensor([[0, 1, 1, 0, 1, 1], [0, 1, 1, 0, 1, 0]], dtype=torch.bool)
    counts = torch.ones(2, queries, dtype=torch.bool)
    counts[1, -1] = False
    fitted = fit_values(logits, counts, value, full, free, ridge=1e-2)
    for row in range(2):
        x = logits[row].softmax(0).T[counts[row]]
        y = full[row][counts[row]] - x @ value[row]
        x = x[:, free[row]]
        lam = 1e-2 * torch.linalg.matrix_norm(x, 2) ** 2
        step = torch.linalg.solve(x.T @ x + lam * torch.eye(x.shape[1], dtype=torch.float64), x.T @ y)
        torch.testing.assert_close(fitted[row][free[row]], value[row][free[row]] + step, rtol=1e-3, atol=1e-3)
        assert torch.equal(fitted[row][~free[row]], value[row][~free[row]])


def test_value_fit_dual_equals_primal():
    """Queries by queries or entries by entries: unused queries turn one system into the other, and change
    nothing."""
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 8, 6, generator=g, dtype=torch.float64)
    value = torch.randn(3, 8, 4, generator=g, dtype=torch.float64)
    full = torch.randn(3, 6, 4, generator=g, dtype=torch.float64)
    free, counts = torch.rand(3, 8, generator=g) < 0.7, torch.ones(3, 6, dtype=torch.bool)
    dual = fit_values(logits, counts, value, full, free, ridge=1e-3)
    pad = torch.nn.functional.pad
    primal = fit_values(pad(logits, (0, 9)), pad(counts, (0, 9)), value, pad(full, (0, 0, 0, 9)), free, ridge=1e-3)
    torch.testing.assert_close(dual, primal, rtol=1e-3, atol=1e-5)  # the spectral norm is iterated
    assert (dual - value)[free].abs().max() > 0.1


def test_value_fit_lowers_the_error():
    """With the fit the output for the queries it saw is closer to the full cache's."""
    entries = random(21, slots=40, votes=False)
    q = torch.randn(1, 3, 30, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    seen = observe(q, 40)
    assign = {n: n - n % 4 for n in range(40) if n % 4}
    rows = q[0].reshape(-1, 8)
    error = [
        (attend(out, rows, seen.scale) - attend(entries, rows, seen.scale)).norm()
        for out in (merge(entries, seen, *groups_of(assign, 40), causal=False, value_fit=fit) for fit in (False, True))
    ]
    assert error[1] < 0.8 * error[0]
