"""A cache on disk."""

import pytest
import torch

import kvpass
from kvpass import models
from tests.conftest import prompt


def run(model, cache, ids):
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits[:, -1]


@pytest.fixture
def saved(compiled, tmp_path):
    model = compiled("qwen2_mixed")
    cache = model.kvpass.new_cache()
    run(model, cache, prompt(40, 2))
    run(model, cache, prompt(1, 2))
    cache.save(tmp_path / "cache.safetensors")
    return model, cache, tmp_path / "cache.safetensors"


def test_save_load_continue_is_continue(saved):
    """A loaded cache goes on bit for bit like the one that was saved."""
    model, cache, path = saved
    loaded = kvpass.load_cache(path, model)
    assert loaded.get_seq_length() == 41 and loaded.entries() == cache.entries()
    for seed in range(12):  # past the sliding window
        assert torch.equal(run(model, loaded, prompt(1, 2, seed)), run(model, cache, prompt(1, 2, seed)))
    assert sorted(p.name for p in path.parent.iterdir()) == ["cache.safetensors"]


def test_predictions_go_with_their_entries(tiny_model, tmp_path):
    """What KeepKV(judge="ema") predicts from is saved, forked and reordered with the cache, and bounded with it."""
    policy = kvpass.policies.KeepKV(judge="ema", window=4)
    model = kvpass.compile(tiny_model("llama"), budget=0.5, policy=policy, decode_budget=24, backend="eager")
    cache = model.kvpass.new_cache()
    run(model, cache, prompt(40, 2))
    for seed in range(40):
        run(model, cache, prompt(1, 2, seed))
    assert all(store.ema.shape == (store.k.shape[0], 2) and not store.ema.isnan().any() for store in cache.stores)
    fork = cache.fork()
    fork.reorder_cache(torch.tensor([1, 0]))
    cache.save(tmp_path / "cache")
    loaded = kvpass.load_cache(tmp_path / "cache", model)
    for twin in (cache, loaded, fork):
        twin.recent = []  # a file has no queries of the last steps
    for seed in range(40):
        token = prompt(1, 2, seed)
        ours, theirs, swapped = run(model, cache, token), run(model, loaded, token), run(model, fork, token[[1, 0]])
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(swapped[[1, 0]], ours, rtol=0, atol=1e-5)


def test_another_model_is_refused(saved, compiled):
    """Another model, or the same with one changed weight, is refused with the reason."""
    _, _, path = saved
    with pytest.raises(ValueError, match="saved from a model with other weights, precision or rotary embedding"):
        kvpass.load_cache(path, compiled("llama"))
    with pytest.raises(ValueError, match=r"needs a model made by kvpass\.compile"):
        kvpass.load_cache(path, models.tiny("llama"))


def test_a_damaged_file_is_refused(saved):
    """A truncated, tampered or foreign file is refused with the reason; nothing is unpickled."""
    model, _, path = saved
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is truncated or not a safetensors file"):
        kvpass.load_cache(path, model)
    path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    with pytest.raises(ValueError, match="was changed after it was saved"):
        kvpass.load_cache(path, model)
    torch.save({"a": 1}, path)
    with pytest.raises(ValueError, match="is truncated or not a safetensors file"):
        kvpass.load_cache(path, model)
    with pytest.raises(ValueError, match="no such file"):
        kvpass.load_cache(path.with_name("nothing"), model)


def test_an_empty_cache_is_not_saved(compiled, tmp_path):
    """There is nothing to save in an empty cache, and no file is left."""
    with pytest.raises(ValueError, match="the cache is empty"):
        compiled("llama").kvpass.new_cache().save(tmp_path / "x")
    assert not list(tmp_path.iterdir())
