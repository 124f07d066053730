"""Masks are told apart by evaluation, whatever their spelling and length."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvpass import models
from kvpass.models import plain
from kvpass.passes.capture import capture
from kvpass.passes.classify import classify
from kvpass.passes.find import find
from kvpass.passes.normalize import normalize
from kvpass.passes.spec import Mask


def masks(model):
    plan = classify(find(normalize(capture(model))))
    assert not plan.refusals
    return [site.mask for site in plan.sites]


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [1, 7, 8, 200, 4096])
def test_window_is_exact(window, attn):
    """A sliding window is read to the token, below and above the length up to which masks are evaluated densely."""
    model = models.tiny("mistral", attn=attn, sliding_window=window, num_hidden_layers=1)
    assert masks(model) == [Mask(window)]


def test_layers_are_classified_one_by_one():
    """A model with a sliding and a full layer gets both."""
    assert masks(models.tiny("qwen2_mixed")) in ([Mask(8), Mask(0)], [Mask(0), Mask(8)])


def test_a_bias_linear_in_position_gives_its_slopes():
    """ALiBi is read by evaluation: a causal mask, and one slope a head."""
    plan = classify(find(normalize(capture(plain.plain_alibi()))))
    assert [site.mask for site in plan.sites] == [Mask(), Mask()]
    assert all(site.slopes == pytest.approx([0.5, 0.25, 0.125, 0.0625]) for site in plan.sites)


def test_a_bias_that_is_not_linear_is_refused():
    """A bias that bends is no channel of a key."""

    def bent(q, k, v, keep, scale):
        at = torch.arange(k.shape[2])
        scores = torch.matmul(q, k.transpose(-1, -2)) * scale - 0.01 * (at[:, None] - at) ** 2
        return torch.matmul(scores.masked_fill(~keep, -3e38).softmax(-1), v)

    plan = classify(find(normalize(capture(plain.decoder(bent)))))
    assert plan.refusals[0].reason == "adds a bias to the logits that is not linear in the key's position"


def test_chunks_of_columns_are_refused_as_padding_moves_them():
    """A chunked mask is only right where chunks begin at a sequence's first token, padding or not."""

    def chunks(causal, hidden):
        at = torch.arange(causal.shape[-1])
        return causal & (at[:, None] // 8 == at // 8)

    plan = classify(find(normalize(capture(plain.decoder(mask=chunks)))))
    assert "is no known function of positions (with padding on the left)" in plan.refusals[0].reason


@pytest.mark.slow
def test_chunked_attention_is_read_to_the_token():
    """Chunks that begin at the first real token are what the operator applies."""
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 64, "intermediate_size": 64, "head_dim": 16}
    layers = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
    config = AutoConfig.for_model(
        "llama4_text", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, attention_chunk_size=8, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        **experts, **layers,
    )  # fmt: skip
    assert masks(AutoModelForCausalLM.from_config(config)) == [Mask(window=8, chunk=8), Mask()]
