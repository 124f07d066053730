"""The lowered step program."""

import pytest
import torch

import kvpass
from tests.conftest import greedy, prompt


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2_mixed", "gpt2"])
def test_lowered_equals_eager(tiny_model, compiled, name):
    """Inductor's step program says what the graph says: budget 1 equals the untouched model, batch 1 and 2."""
    ours = compiled(name, budget=1.0, backend="inductor")
    for batch in (1, 2):
        ids = prompt(30, batch)
        assert torch.equal(greedy(ours, ids, 24), greedy(tiny_model(name), ids, 24))


@pytest.mark.slow
def test_columns_of_a_longer_tensor(tiny_model, compiled):
    """A step reads its tokens wherever they lie: a batch fed column by column, without positions, is the model's."""
    ours, ids = compiled("llama", budget=1.0, backend="inductor"), prompt(12, 3)
    cache = ours.kvpass.new_cache()
    with torch.no_grad():
        full = tiny_model("llama")(ids).logits
        ours(ids[:, :8], past_key_values=cache)
        for step in range(8, 12):
            logits = ours(ids[:, step : step + 1], past_key_values=cache).logits
            torch.testing.assert_close(logits[:, -1], full[:, step], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_repeated_layers_are_lowered_once(tiny_model):
    """Layers that are the same function on other weights share their code: five layers compile as three regions."""
    from kvpass import models

    model = kvpass.compile(models.tiny("llama", num_hidden_layers=5), budget=0.5)
    greedy(model, prompt(20), 2)
    calls = model.kvpass.runtime.lower(1).calls
    assert len(calls) == 6 + 5 and len({call.run for call in calls}) == 3 + 1  # attentions are called directly


@pytest.mark.slow
@pytest.mark.parametrize("decode_budget", [None, 30])
def test_two_hundred_steps_compile_nothing(tiny_model, decode_budget):
    """After warm-up 200 steps recompile nothing, whatever the rows and tails grow to, and the store stays in place."""
    model = kvpass.compile(tiny_model("llama"), budget=0.3, decode_budget=decode_budget)
    greedy(model, prompt(20), 4)
    cache = model.kvpass.new_cache()
    with torch.no_grad(), torch.compiler.set_stance("fail_on_recompile"):
        model(prompt(50), past_key_values=cache)
        where = [store.k.data_ptr() for store in cache.stores]
        for _ in range(200):
            model(prompt(1), past_key_values=cache)
        if decode_budget is None:
            assert [store.k.data_ptr() for store in cache.stores] == where
        for length in (1, 2, 7, 300):  # rows of one entry and of many
            greedy(model, prompt(length), 4)
