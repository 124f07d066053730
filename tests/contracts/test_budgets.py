"""A budget is what is physically stored."""

import dataclasses
from fractions import Fraction

import pytest
import torch

import kvpass
from kvpass import models, policies
from tests.conftest import prompt


@pytest.fixture(scope="module")
def long_model():
    return models.tiny("llama", max_position_embeddings=2048)


def stored(model, length, batch=1):
    with torch.no_grad():
        cache = model.kvpass.new_cache()
        model(prompt(length, batch), past_key_values=cache)
    return cache


@pytest.mark.parametrize("policy", ["streaming", "snapkv", "keepkv"])
@pytest.mark.parametrize("budget", [0.1, 0.2, 0.3, 0.7, 0.9])
def test_kept_entries_are_exact(long_model, budget, policy):
    """Entries over all rows are floor(budget * total) in exact arithmetic, and never less than one a row."""
    model = kvpass.compile(long_model, budget=budget, policy=policy, backend="eager")
    rows = 2 * 2  # layers x KV heads
    for length in (10, 20, 50, 100, 1000):
        expected = max(rows, Fraction(str(budget)) * length * rows // 1)
        assert stored(model, length).entries() == expected, length


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("budget", [0.01, 0.1, 0.9])
def test_short_prompts_keep_at_least_one_entry_a_row(compiled, length, budget):
    """Prompts of 1, 2 and 3 tokens: at least one entry a row, and finite logits after."""
    model = compiled("llama", budget=budget)
    cache = stored(model, length)
    assert all(int(rows.min()) >= 1 for rows in cache.lengths())
    with torch.no_grad():
        assert torch.isfinite(model(prompt(1), past_key_values=cache).logits).all()


def test_an_integer_budget_is_entries_per_row(compiled):
    """budget=16 and budget=16/64 of a 64-token prompt give the same cache."""
    absolute, relative = (stored(compiled("llama", budget=b), 64) for b in (16, 0.25))
    assert absolute.entries() == relative.entries() == 16 * 4
    assert all(torch.equal(a.pos, b.pos) for a, b in zip(absolute.stores, relative.stores, strict=True))


def test_grouped_heads_are_stored_once(compiled):
    """Bytes are at KV-head granularity, and close to the entries: no query-head copy, no padding of short rows."""
    cache = stored(compiled("llama_mqa", budget=0.5), 400)
    entry = 2 * 16 * 4 + 4 + 4 + 4  # key and value in fp32, log-vote, tokens, position
    assert cache.nbytes() < 1.1 * cache.entries() * entry + 2000


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_rows_of_very_different_lengths(tiny_model, attn):
    """A budget shared over layers and heads leaves rows of 1 to many entries, and decoding runs on them."""
    policy = policies.get("snapkv")
    policy = dataclasses.replace(policy, allocator="global", floor=0.0, window=1, sinks=0)
    model = kvpass.compile(tiny_model("llama", attn), budget=0.3, policy=policy, backend="eager")
    cache = stored(model, 100, 2)
    lengths = torch.stack(cache.lengths(), 1)  # [B, L, Hkv]
    assert lengths.sum((1, 2)).tolist() == [120, 120] and int(lengths.max()) > 1.2 * int(lengths.min())
    with torch.no_grad():
        assert torch.isfinite(model(prompt(1, 2), past_key_values=cache).logits).all()


def test_no_loop_over_heads(compiled):
    """A decode step is as many operations for one KV head as for four."""
    graphs = [compiled(name).kvpass.runtime.step.module.graph for name in ("llama", "llama_mqa", "llama_mha")]
    assert len({sum(node.op == "call_function" for node in graph.nodes) for graph in graphs}) == 1


def test_sliding_layers_keep_their_window(compiled):
    """Sliding layers hold exactly their window however long the text is."""
    model = compiled("qwen2_mixed", budget=0.5)
    cache = stored(model, 40)
    window = next(layer.window for layer in cache.specs if layer.window)
    with torch.no_grad():
        for _ in range(3 * window):
            model(prompt(1), past_key_values=cache)
    sliding = [rows for rows, layer in zip(cache.lengths(), cache.specs, strict=True) if layer.window]
    assert all(int(rows.max()) == window for rows in sliding)


@pytest.mark.parametrize("budget", [0, 0.0, -0.1, 1.5, -3, True, "half", float("nan"), None])
def test_a_bad_budget_is_one_sentence(tiny_model, budget):
    """Anything but a float in (0, 1] or an int >= 1 is a ValueError that says what is accepted."""
    with pytest.raises(ValueError, match=r"budget must be a float in \(0, 1\]"):
        kvpass.compile(tiny_model("llama"), budget=budget)


def test_a_bad_policy_lists_the_known_ones(tiny_model):
    """An unknown policy or backend is a ValueError with the known names."""
    with pytest.raises(ValueError, match="unknown policy 'h3o'; known: streaming, snapkv"):
        kvpass.compile(tiny_model("llama"), policy="h3o")
    with pytest.raises(ValueError, match="unknown backend 'tpu'; known: inductor, eager"):
        kvpass.compile(tiny_model("llama"), backend="tpu")


def test_a_policy_that_needs_the_future(tiny_model):
    """A policy that judges by the continuation is refused in one sentence: only an evaluation knows it."""
    with pytest.raises(ValueError, match="'oracle' judges by the tokens that follow"):
        kvpass.compile(tiny_model("llama"), policy="oracle")


@pytest.mark.parametrize("policy, batch", [("streaming", 1), ("snapkv", 3), ("keepkv", 1)])
def test_a_decode_budget_bounds_the_cache(tiny_model, policy, batch):
    """With decode_budget the cache never holds more than budget + slack entries a row, over 240 steps."""
    model = kvpass.compile(tiny_model("llama"), budget=0.5, policy=policy, decode_budget=40, backend="eager")
    cache = stored(model, 60, batch)
    with torch.no_grad():
        for step in range(240):
            logits = model(prompt(1, batch, seed=step), past_key_values=cache).logits
            assert cache.entries() <= 4 * batch * (40 + 32), step
    assert torch.isfinite(logits).all() and cache.get_seq_length() == 300
    assert cache.times.maintain > 0


@pytest.mark.slow
@pytest.mark.parametrize("judge", ["recent", "ema"])
def test_a_thousand_steps_lose_no_vote(long_model, judge):
    """Over 1,000 steps at decode_budget rows stay below budget + slack, everything is finite, and where every dropped
    entry joins another the rows stand for every token seen."""
    policy = policies.KeepKV(judge=judge, orphan="absorb", negligible=0.0, max_votes=1 << 20)
    model = kvpass.compile(long_model, budget=0.5, policy=policy, decode_budget=40, backend="eager")
    cache = stored(model, 60)
    with torch.no_grad():
        for step in range(1000):
            logits = model(prompt(1, seed=step), past_key_values=cache).logits
            assert cache.entries() <= 4 * (40 + 32) and torch.isfinite(logits).all(), step
    rows = [store.tokens.view(2, -1).sum(-1) + cache.tails[0].cursor for store in cache.stores]
    assert torch.stack(rows).unique().tolist() == [1060]
    assert all(tensor.isfinite().all() for store in cache.stores for tensor in (store.k, store.v, store.log_votes))


def test_without_a_decode_budget_rows_grow_by_one(compiled):
    """Without decode_budget each step appends exactly one entry a row, with one vote."""
    model = compiled("llama", budget=0.3)
    cache = stored(model, 60)
    before = cache.entries()
    with torch.no_grad():
        for _ in range(10):
            model(prompt(1), past_key_values=cache)
    assert cache.entries() == before + 10 * 4
