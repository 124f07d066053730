import pytest
import torch

from kvpass.models import tiny
from kvpass.models.zoo import CAUSAL, ZOO

# One row of each way of building a config; tests/models/test_zoo.py compiles all of them.
CORE = ("llama", "mistral", "qwen2_mixed", "gemma3_text", "gpt2", "phi", "opt")
BUILT = tuple(name for name, row in ZOO.items() if row.head == CAUSAL)


def _tokens(batch, length):
    return torch.randint(0, 128, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("attn", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CORE)
def test_builds_and_exports(name, attn, check_export):
    """Every row builds with the attention asked for and exports with dynamic batch and length."""
    model = tiny(name, attn=attn)
    assert model.config._attn_implementation == attn
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert check_export(model) == 0.0


@pytest.mark.parametrize("name", BUILT)
def test_same_weights_every_time(name):
    """The same name gives the same weights whatever the global random state is."""
    torch.manual_seed(1)
    first = tiny(name).state_dict()
    torch.manual_seed(2)
    second = tiny(name).state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_leaves_random_state_alone():
    """Building a model does not advance the global random state."""
    before = torch.get_rng_state()
    tiny("llama")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", CORE)
def test_attention_decides_tokens(name):
    """An earlier token changes the last logits, and greedy text varies and differs between prompts."""
    model = tiny(name)
    ids = _tokens(4, 6)
    changed = ids.clone()
    changed[:, 2] = (changed[:, 2] + 1) % 128
    with torch.no_grad():
        moved = (model(ids).logits - model(changed).logits)[:, -1].abs().amax(dim=-1)
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    assert moved.min() > 0.1
    rows = [tuple(row) for row in text[:, 6:].tolist()]
    assert len(set(rows)) == len(rows)
    assert all(len(row) == 24 and len(set(row)) >= 4 for row in rows)


@pytest.mark.parametrize("name", BUILT)
def test_common_shape(name):
    """Every row is small: at most 4 layers, hidden size 64 in 4 heads, 128 token ids and 300,000 weights."""
    model = tiny(name)
    config = model.config
    assert config.num_hidden_layers <= 4
    assert (config.hidden_size, config.vocab_size) == (64, 128)
    assert getattr(config, "num_attention_heads", 4) == 4
    assert sum(parameter.numel() for parameter in model.parameters()) < 300_000


def test_overrides_take_common_and_own_names():
    """An override reaches the config under transformers' common name or the model's own."""
    assert len(tiny("gpt2", num_hidden_layers=1).transformer.h) == 1
    assert len(tiny("gpt2", n_layer=1).transformer.h) == 1
    assert tiny("mistral", sliding_window=4).config.sliding_window == 4


def test_refuses_unknown_names_and_keywords():
    """A misspelt decoder or config keyword is an error that names it."""
    with pytest.raises(ValueError, match=r"'lama'.*llama"):
        tiny("lama")
    with pytest.raises(ValueError, match="bloom has no sdpa attention; it has: eager"):
        tiny("bloom", attn="sdpa")
    with pytest.raises(TypeError, match="'num_layer'"):
        tiny("llama", num_layer=1)


def test_window_rows_really_have_a_window():
    """mistral forgets a token that has left its two stacked windows; mistral_full does not."""
    ids = _tokens(1, 40)
    changed = ids.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 128
    with torch.no_grad():
        windowed, full = tiny("mistral"), tiny("mistral_full")
        assert torch.equal(windowed(ids).logits[:, -1], windowed(changed).logits[:, -1])
        assert not torch.equal(full(ids).logits[:, -1], full(changed).logits[:, -1])


def test_mixed_rows_have_one_layer_of_each_kind():
    """The mixed rows hold one sliding layer, then one full layer."""
    for name in ("qwen2_mixed", "gemma3_text"):
        assert tiny(name).config.layer_types == ["sliding_attention", "full_attention"]


def test_rows_are_read_only():
    """The table cannot be changed by accident."""
    with pytest.raises(TypeError):
        ZOO["llama"] = None
