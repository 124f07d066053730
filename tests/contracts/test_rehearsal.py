"""Policies that judge by tokens rehearsed after the prompt."""

import pytest
import torch

import kvpass
from kvpass.policies import HeadKV, KVzip
from tests.conftest import greedy, prompt

SMALL = [KVzip(chunk=20, lead=3, instruction=(5, 6)), HeadKV(window=8, needles=4, span=4)]


def stored(model, ids, chunk=None, mask=None):
    """The cache after a prompt and two tokens."""
    cache = model.kvpass.new_cache()
    greedy(model, ids, 2, mask, past_key_values=cache, prefill_chunk_size=chunk)
    return cache


@pytest.mark.parametrize("policy", SMALL, ids=lambda p: p.name)
@pytest.mark.parametrize("name", ["llama", "qwen2_mixed"])
def test_nothing_of_a_rehearsal_stays(compiled, name, policy):
    """A rehearsal leaves no entry and moves no position; at budget 1 the untouched model's tokens come out."""
    ids = prompt(50)
    cache = stored(compiled(name, budget=0.3, policy=policy), ids)
    assert all(
        int(store.pos.max()) == 49 for store, layer in zip(cache.stores, cache.specs, strict=True) if not layer.window
    )
    assert cache.columns == 51
    model = compiled(name, budget=1.0, policy=policy)
    assert torch.equal(greedy(model, ids, 12), greedy(model.kvpass.original, ids, 12))


@pytest.mark.parametrize("policy", SMALL, ids=lambda p: p.name)
def test_batches_and_chunks_rehearse_alike(compiled, policy):
    """Rows of a padded batch and prompts given in chunks keep what they keep alone and in one piece."""
    model, rows = compiled("qwen2_mixed", budget=0.3, policy=policy), [prompt(50, seed=1), prompt(31, seed=2)]
    ids, mask = torch.zeros(2, 50, dtype=torch.int64), torch.zeros(2, 50, dtype=torch.int64)
    for b, row in enumerate(rows):
        ids[b, -row.shape[1] :], mask[b, -row.shape[1] :] = row, 1
    together, pieces = stored(model, ids, None, mask), stored(model, rows[0], 20)
    for b, row in enumerate(rows):
        alone = stored(model, row)
        for batched, single in zip(together.stores, alone.stores, strict=True):
            for h in range(single.row_len.shape[1]):
                assert kept(batched, b, h) == kept(single, 0, h)
        if b == 0:
            assert all(torch.equal(x.pos, y.pos) for x, y in zip(alone.stores, pieces.stores, strict=True))


def kept(store, b, h):
    start = int(store.row_start[b, h])
    return store.pos[start : start + int(store.row_len[b, h])].tolist()


def test_kvzip_judges_by_the_repetition(compiled, tiny_model):
    """What is kept is what the untouched model attends to when the prompt is written twice."""
    model, ids = compiled("llama", budget=0.3, policy="kvzip"), prompt(40)
    cache = stored(model, ids)
    with torch.no_grad():
        seen = tiny_model("llama", "eager")(torch.cat([ids, ids], 1), output_attentions=True).attentions
    heads = cache.stores[0].row_len.shape[1]
    rows = torch.stack([layer[0, :, 40:, :40].amax(1).unflatten(0, (heads, -1)).amax(1) for layer in seen])
    rows[..., :4] = rows[..., 39] = torch.inf
    least = rows.flatten().sort(descending=True).values[int(0.3 * rows.numel()) - 1]
    for layer, store in enumerate(cache.stores):
        for h in range(heads):
            assert kept(store, 0, h) == (rows[layer, h] >= least).nonzero().flatten().tolist()


def test_what_a_rehearsal_cannot_do(compiled, tiny_model):
    """A second prompt on the same cache, and a decode budget, are refused in one sentence, and nothing changes."""
    model, ids = compiled("llama", policy="kvzip"), prompt(30)
    cache = stored(model, ids)
    before = [tensor.clone() for tensor in cache.tensors()]
    with pytest.raises(kvpass.cache.CacheError, match="'kvzip' rehearses a whole prompt"):
        model(prompt(9), past_key_values=cache)
    assert all(torch.equal(x, y) for x, y in zip(before, cache.tensors(), strict=True))
    with pytest.raises(ValueError, match="'kvzip' rehearses the prompt"):
        kvpass.compile(tiny_model("llama"), policy="kvzip", decode_budget=40)
