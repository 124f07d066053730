"""Rows rebuilt from full keys and values that are kept outside the cache."""

import gc
import os
import resource

import pytest
import torch

import kvpass
from kvpass.cache import Observed
from kvpass.kernels.layout import unpack
from kvpass.policies.keepkv import KeepKV
from kvpass.refresh import thinned
from tests.conftest import prompt

# Nothing is lost: who resembles no kept entry still adds its votes, mass and value to the nearest.
LOSSLESS = KeepKV(judge="last", orphan="absorb", negligible=0.0, excess=float("inf"), max_votes=1 << 20, window=4)


@pytest.fixture(scope="module")
def make(tiny_model):
    return lambda name="llama", policy="snapkv", **more: kvpass.compile(
        tiny_model(name), **{"budget": 0.2, "policy": policy, "backend": "eager"} | more
    )


def run(model, cache, ids, **more):
    with torch.no_grad():
        return model(ids, past_key_values=cache, **more).logits[:, -1]


def filled(model, length=40, batch=1, steps=0):
    cache = model.kvpass.new_cache()
    run(model, cache, prompt(length, batch))
    for seed in range(steps):
        run(model, cache, prompt(1, batch, seed))
    return cache


def votes(cache):
    """Tokens that each row stands for, a list over the layers."""
    return [int(n) for store in cache.stores for n in unpack(store).tokens.sum(-1).flatten()]


def outputs(entries, q, scale):
    """Attention [B, Hq, Dv] of one query a head over every entry, in fp64."""
    k, v, m = (
        x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (entries.k, entries.v, entries.log_votes)
    )
    weights = ((k @ q.double().transpose(2, 3)).squeeze(-1) * scale + m).softmax(-1)
    return (weights.unsqueeze(2) @ v).squeeze(2)


def test_refreshed_at_every_step_nothing_is_lost(make, tiny_model):
    """With refresh=1 and KeepKV(judge="last") in a model of one query head a KV head, every step's logits equal the
    full cache's, recomputing a step's attention on the compressed rows gives what it was, and votes are conserved."""
    model, ids = make("gpt2", LOSSLESS, budget=0.3, refresh=1), torch.cat([prompt(40), prompt(12, seed=1)], 1)
    cache = filled(model)
    with torch.no_grad():
        expected = tiny_model("gpt2")(ids).logits
    for at in range(40, 52):
        assert (run(model, cache, ids[:, at : at + 1]) - expected[:, at]).abs().max() < 1e-5
        step, full = cache.recent[-1], cache.full.load(cache.seen)
        for layer, store, whole, q in zip(cache.specs, cache.stores, full, step.queries, strict=True):
            then, now = (outputs(unpack(x), q, layer.scale) for x in (whole, store))
            assert (then - now).abs().max() < 1e-5 * then.abs().max().clamp(min=1)
            assert int(store.row_len.max()) <= int(0.3 * (at + 1)) + 1
        assert votes(cache) == [at + 1] * sum(layer.kv_heads for layer in cache.specs)
    assert cache.times.refreshes == 12


def test_refreshing_brings_back_what_was_dropped(make):
    """After a refresh the cache is what compressing everything seen would keep, not what the prompt left over."""
    model = make(refresh=4, decode_budget=30)
    cache = filled(model, 60, steps=3)
    assert cache.times.refreshes == 0 and cache.entries() == 4 * (12 + 3)
    run(model, cache, prompt(1, seed=9))
    assert cache.times.refreshes == 1 and cache.entries() == 4 * 30
    for store, full in zip(cache.stores, cache.full.load(cache.seen), strict=True):
        kept, whole = unpack(store), unpack(full)
        assert torch.equal(kept.k, whole.take(kept.pos.long(), kept.valid).k)


def test_forks_beams_and_padding_refresh_as_alone(make):
    """A fork, a reordered batch and a padded one are, after refreshes, what each sequence would be by itself."""
    model = make(refresh=3)
    cache = model.kvpass.new_cache()
    mask = torch.ones(2, 30, dtype=torch.int64)
    mask[1, :10] = 0
    ids = prompt(30, 2)
    run(model, cache, ids, attention_mask=mask)
    fork = cache.fork()
    fork.reorder_cache(torch.tensor([1, 1, 0]))
    alone = [model.kvpass.new_cache() for _ in range(2)]
    run(model, alone[0], ids[:1])
    run(model, alone[1], ids[1:, 10:])
    for seed in range(7):
        token = prompt(1, seed=seed)
        together, three = run(model, cache, token.expand(2, 1)), run(model, fork, token.expand(3, 1))
        singly = torch.cat([run(model, one, token) for one in alone])
        torch.testing.assert_close(together, singly, rtol=0, atol=1e-5)
        torch.testing.assert_close(three, singly[[1, 1, 0]], rtol=0, atol=1e-5)
    assert cache.times.refreshes == fork.times.refreshes == 2


def test_turns_chunks_and_crops_keep_the_full_text(make):
    """Prompts in chunks, a second turn and cropped drafts: what is outside is every token seen, once and in order."""
    model = make(refresh=5, decode_budget=12)
    whole, cache = filled(model, 40), model.kvpass.new_cache()
    cache.prompt_end = 40
    run(model, cache, prompt(40)[:, :17])
    run(model, cache, prompt(40)[:, 17:])
    cache.prompt_end = None
    for twin in (whole, cache):
        twin.activate_past_recording()
        run(model, twin, prompt(6, seed=2))
        twin.crop(-4)
        twin.stop_recording()
        for seed in range(6):
            run(model, twin, prompt(1, seed=seed))
        run(model, twin, prompt(9, seed=3))
        assert twin.times.refreshes == 0  # counted anew in each turn
    torch.testing.assert_close(run(model, cache, prompt(1)), run(model, whole, prompt(1)), rtol=0, atol=1e-5)
    assert [store.pos.tolist() for store in cache.full.load(cache.seen)] == [list(range(57)) * 2] * 2


@pytest.mark.parametrize("where", ["memory", "file"])
def test_the_outside_is_measured_and_bounded(make, tmp_path, where):
    """I/O time and bytes are columns of the report; beyond its limit the run goes on unrefreshed, which a warning and
    the report say once; nothing is left in the folder."""
    token = 2 * 2 * 2 * 16 * 4  # layers x KV heads x (key + value) x head dim x fp32
    where = "memory" if where == "memory" else tmp_path
    model = make(refresh=kvpass.Refresh(every=4, where=where, limit=50 * token))
    cache = filled(model, 40, steps=4)
    report = model.kvpass.report(cache)
    assert report.refresh["refreshes"] == 1 and report.refresh["stopped"] == "" and report.refresh["io_seconds"] > 0
    assert report.refresh["held_mib"] == report.refresh["written_mib"] == 44 * token / 2**20
    assert report.refresh["queries_mib"] > 0  # which judge again
    assert report.refresh["read_mib"] == 40 * token / 2**20
    assert "written MiB" in str(report) and list(tmp_path.iterdir()) == []
    with pytest.warns(RuntimeWarning, match="goes on without refreshing: the limit of") as caught:
        for _ in range(12):
            assert run(model, cache, prompt(1)).isfinite().all()
    report = model.kvpass.report(cache)
    assert len(caught) == 1 and report.refresh["stopped"] == f"the limit of {50 * token} bytes is reached"
    assert report.refresh["held_mib"] == report.refresh["queries_mib"] == 0 and report.refresh["refreshes"] == 3


def test_a_full_disk_ends_refreshing_only(make, tmp_path):
    """Where the file cannot grow there is one warning with the system's reason, and decoding goes on."""
    model = make(refresh=kvpass.Refresh(every=2, where=tmp_path))
    plain, cache = filled(make()), filled(model)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (28 * 1024, hard))
    try:
        with pytest.warns(RuntimeWarning, match="goes on without refreshing: .*File too large") as caught:
            for seed in range(6):
                run(model, cache, prompt(1, seed=seed))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(caught) == 1 and "File too large" in model.kvpass.report(cache).refresh["stopped"]
    assert run(model, cache, prompt(1)).isfinite().all() and plain.full is None


def test_a_file_and_memory_say_the_same(make, tmp_path):
    """Where the full keys and values lie changes nothing, and the file is gone with its last cache."""
    caches = {}
    for where in ("memory", tmp_path):
        model = make(refresh=kvpass.Refresh(every=3, where=where))
        caches[where] = filled(model, 30, batch=2, steps=7)
    first, second = caches.values()
    assert all(torch.equal(a.k, b.k) for a, b in zip(first.stores, second.stores, strict=True))
    fork, handle = second.fork(), second.full.file.handle
    del caches, first, second
    gc.collect()
    assert os.fstat(handle).st_nlink == 0 and fork.full.load(fork.seen)[0].k.shape[0] == 2 * 2 * 36
    del fork
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_a_saved_cache_goes_on_unrefreshed(make, tmp_path):
    """save() leaves the full keys and values out and says so; the report of what is loaded says why."""
    model = make(refresh=2)
    with pytest.warns(RuntimeWarning, match="leaves out the full keys and values that refreshing reads"):
        filled(model, 20).save(tmp_path / "cache")
    loaded = kvpass.load_cache(tmp_path / "cache", model)
    for _ in range(4):
        run(model, loaded, prompt(1))
    assert loaded.times.refreshes == 0 and "loaded from a file" in model.kvpass.report(loaded).refresh["stopped"]


def test_a_threshold_refreshes_when_attention_moves(make):
    """With a threshold rows are rebuilt at the first look, every 8 steps, at which attention has moved that far."""
    counts = [
        filled(make(refresh=kvpass.Refresh(every=None, threshold=t)), 40, steps=24).times.refreshes
        for t in (1e-6, 0.999)
    ]
    assert counts == [2, 0]


@pytest.mark.parametrize(
    "given, message",
    [
        (0, "every must be an int >= 1 or None, got 0"),
        ("often", "every must be an int >= 1 or None, got 'often'"),
        ({"every": None}, "with every=None a threshold must say when"),
        ({"threshold": 2}, r"threshold is a share in \(0, 1\), got 2"),
        ({"where": "/no/such/folder"}, "where is 'memory' or a folder that exists"),
        ({"limit": -1}, "limit must be an int >= 0 or None, got -1"),
    ],
)
def test_a_bad_refresh_is_one_sentence(make, given, message):
    """A number out of range or a folder that does not exist is a ValueError with what is accepted."""
    with pytest.raises(ValueError, match=message):
        make(refresh=kvpass.Refresh(**given) if isinstance(given, dict) else given)


def test_without_refresh_nothing_is_kept(make):
    """refresh=None keeps nothing outside, returns no queries from a step, and the report has no such part."""
    model = make()
    cache = filled(model, 20, steps=2)
    assert cache.full is None and cache.recent == [] and model.kvpass.report(cache).refresh is None


def test_queries_from_all_over_the_text_judge():
    """What is remembered of a text are, for each sequence, the queries nearest to where a prompt would be observed."""
    pos = torch.tensor([[0, 10, 20, 30, 31, 32, -1], [-1, 4, 0, 8, 9, -1, -1]], dtype=torch.int32)
    queries = pos[:, None, :, None].float().expand(2, 2, 7, 3)
    policy = KeepKV(window=2, references=4, recency=1.0, asked=0.0)  # of 34 tokens: 0, 11, 22, 33 and the last two
    left = thinned(Observed([queries], pos, torch.tensor([34, 10])), policy, torch.tensor([34, 10]))
    assert left.pos.tolist() == [[0, 10, 20, 32], [0, 4, 8, 9]]
    assert torch.equal(left.queries[0], left.pos[:, None, :, None].float().expand(2, 2, 4, 3))
