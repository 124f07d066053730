"""Keys and values stored below the model's precision."""

import pytest
import torch

import kvpass
from tests.conftest import greedy, prompt


def filled(model, length=100):
    cache = model.kvpass.new_cache()
    with torch.no_grad():
        model(prompt(length), past_key_values=cache)
        logits = [model(prompt(1, seed=s), past_key_values=cache).logits[0, -1] for s in range(5)]
    return cache, torch.stack(logits)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kv_dtype, tolerance", [("bf16", 3e-2), ("fp16", 4e-3)])
@pytest.mark.parametrize("name", ["llama", "qwen2_mixed"])
def test_half_the_bytes(tiny_model, name, kv_dtype, tolerance, backend):
    """bf16 and fp16 storage takes half the bytes for keys and values, and logits move by its rounding only."""
    model = tiny_model(name)
    wide, wide_logits = filled(kvpass.compile(model, budget=0.5, policy="snapkv", backend=backend))
    half, half_logits = filled(kvpass.compile(model, budget=0.5, policy="snapkv", kv_dtype=kv_dtype, backend=backend))
    assert 2 * sum(s.k.nbytes for s in half.stores) == sum(s.k.nbytes for s in wide.stores) > 0
    assert all(store.log_votes.dtype == torch.float32 for store in half.stores)
    difference = (half_logits - wide_logits).abs().max() / wide_logits.abs().max()
    assert 0 < difference < tolerance


def test_the_first_token_is_not_rounded(tiny_model):
    """The prompt's own attention sees its keys in the model's precision."""
    ids = prompt(50)
    with torch.no_grad():
        ours = kvpass.compile(tiny_model("llama"), budget=0.2, kv_dtype="bf16", backend="eager")(ids).logits
        torch.testing.assert_close(ours, tiny_model("llama")(ids).logits, rtol=0, atol=1e-4)


def test_merging_on_stored_keys(tiny_model):
    """Merging, decoding and a decode budget run on bf16 storage."""
    model = kvpass.compile(tiny_model("llama"), budget=0.3, kv_dtype="bf16", decode_budget=30, backend="eager")
    assert greedy(model, prompt(80, 2), 60).shape == (2, 140)


def test_an_unknown_dtype_lists_the_known_ones(tiny_model):
    """Anything else is a ValueError with the known names."""
    with pytest.raises(ValueError, match="unknown kv_dtype 'int3'; known: bf16, fp16, fp32"):
        kvpass.compile(tiny_model("llama"), kv_dtype="int3")
