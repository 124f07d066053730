"""Models the compiler must leave alone, each with the sentence that says why."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

import kvpass
from kvpass.models import counterexamples
from kvpass.passes.capture import capture

REASONS = {
    "bidirectional": "blocks.0.mixer: the mask is bidirectional at node",
    "prefix_lm": "blocks.0.mixer: the mask is prefix(4) at node",
    "data_dependent_mask": "blocks.0.mixer: the mask depends on activations at node embedding",
    "image_tokens": "blocks.0.mixer: the mask depends on the tokens themselves at node lt",
    "unread_step": "blocks.0.mixer: unread step sigmoid.default between scores and softmax at node sigmoid",
    "mixed_heads": "blocks.0.mixer: scales the logits after the mask at node",
    "stochastic": "unread step aten.native_dropout.default between softmax and values at node native_dropout",
    "recurrent": "blocks.1.mixer.taps: mixes tokens outside attention (aten.conv1d.default) at node conv1d",
}


def test_every_counterexample_has_its_reason_here():
    """No counter-example goes without an asserted reason."""
    assert {function.__name__ for function in counterexamples.COUNTEREXAMPLES} == set(REASONS)


@pytest.mark.parametrize("name", REASONS)
def test_refused_with_layer_node_and_source_line(name):
    """The model is refused by name of layer, node and source line, and computes afterwards what it did before."""
    model = getattr(counterexamples, name)()
    ids = torch.arange(3, 12)[None]
    torch.manual_seed(0)
    before, attributes = model(ids).logits, dict(vars(model))
    with pytest.raises(kvpass.UnsupportedModelError) as refused:
        kvpass.compile(model, budget=0.5, backend="eager")
    assert REASONS[name] in str(refused.value)
    assert ".py:" in str(refused.value)
    torch.manual_seed(0)
    assert torch.equal(model(ids).logits, before)
    assert vars(model).keys() == attributes.keys()


def test_a_refusal_leaves_the_captured_graph_as_it_was():
    """Analysis never edits: the graph's code is the same before and after a refusal."""
    from kvpass.passes.classify import classify
    from kvpass.passes.find import find
    from kvpass.passes.normalize import normalize

    captured = normalize(capture(counterexamples.bidirectional()))
    code = captured.module.code
    assert classify(find(captured)).refusals
    captured.module.recompile()
    assert captured.module.code == code


def test_encoder_decoder_is_refused():
    """An encoder-decoder is refused before anything is traced."""
    config = AutoConfig.for_model(
        "t5", d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32, decoder_start_token_id=0
    )
    with pytest.raises(kvpass.UnsupportedModelError, match="is an encoder-decoder, and only decoders are supported"):
        kvpass.compile(AutoModelForSeq2SeqLM.from_config(config))


def test_something_that_is_no_decoder_is_refused():
    """A module without input_ids is refused, and so is something that is no module."""
    with pytest.raises(kvpass.UnsupportedModelError, match="its forward takes no input_ids"):
        kvpass.compile(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module that decodes text, got str"):
        kvpass.compile("smollm2")
