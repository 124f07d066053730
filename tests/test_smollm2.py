"""The promises on a real pretrained model."""

import pytest
import torch
from transformers import pipeline

import kvpass
from kvpass import models
from kvpass.benchmarks import text
from tests.conftest import greedy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield models.load("smollm2")
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def document(smollm2):
    model, tokenizer = smollm2
    return text.prompt(tokenizer, model.config.vocab_size, 2000, 1, seed=0)


def test_budget_one_is_exact(smollm2, document):
    """2,000 tokens of real text: at budget 1.0 64 greedy tokens are the untouched model's and logits agree to 1e-4."""
    model, _ = smollm2
    exact = kvpass.compile(model, budget=1.0)
    expected = greedy(model, document, 64, eos_token_id=None)
    assert torch.equal(greedy(exact, document, 64, eos_token_id=None), expected)
    with torch.no_grad():
        logits = model(expected[:, :-1], use_cache=False, logits_to_keep=4).logits
        cache = exact.kvpass.new_cache()
        exact(document, past_key_values=cache, logits_to_keep=1)
        steps = [exact(token, past_key_values=cache).logits for token in expected[:, 2000:-1].split(1, dim=1)]
    torch.testing.assert_close(torch.cat(steps, 1)[:, -4:], logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("policy", ["streaming", "snapkv", "keepkv"])
def test_the_first_token_is_the_full_caches(smollm2, document, policy):
    """At budgets 0.5 and 0.05 the first new token's logits are the untouched model's, to rounding."""
    model, _ = smollm2
    ids = document[:, :700]
    with torch.no_grad():
        expected = model(ids, use_cache=False, logits_to_keep=1).logits
        for budget in (0.5, 0.05):
            actual = kvpass.compile(model, budget=budget, policy=policy, backend="eager")(ids, logits_to_keep=1).logits
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_memory_falls_to_the_reports_figure(smollm2):
    """After a 4,096-token prompt torch's allocator holds what the report says, and an eighth of the full cache."""
    model, tokenizer = smollm2
    ids = text.prompt(tokenizer, model.config.vocab_size, 4096, 1, seed=1)
    compiled = kvpass.compile(model, budget=0.1, backend="eager")
    cache = compiled.kvpass.new_cache()
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        compiled(ids, past_key_values=cache, logits_to_keep=1)
    held = sum(event.self_cpu_memory_usage for event in profile.key_averages())  # allocated less freed
    report = compiled.kvpass.report(cache)
    assert held == pytest.approx(report.mib * 2**20, rel=0.05)
    assert report.mib < report.full_mib / 8


def test_text_generation_pipeline(smollm2):
    """pipeline("text-generation") takes a compiled model and a conversation, template markers in the text included."""
    model, tokenizer = smollm2
    compiled = kvpass.compile(model, budget=0.5)
    generator = pipeline("text-generation", model=compiled, tokenizer=tokenizer)
    for content in ("What is the capital of France?", "#" * 1000 + "<|im_end|> What is the capital of France?"):
        result = generator([{"role": "user", "content": content}], max_new_tokens=12, do_sample=False)
        assert result[0]["generated_text"][-1]["role"] == "assistant"
    assert compiled.kvpass.report().seconds["decoded"] > 0


def test_a_chat_ends_where_the_untouched_models_does(smollm2):
    """With the chat template and the model's own end-of-turn ids, budget 1 gives the untouched model's answer."""
    model, tokenizer = smollm2
    facts = "The lighthouse keeper is called Anselm. He has a dog named Biscuit and a boat named Heron. "
    chat = [{"role": "user", "content": facts + "What is the name of the dog?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    expected = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert torch.equal(
        kvpass.compile(model, budget=1.0).generate(**inputs, max_new_tokens=24, do_sample=False), expected
    )
    assert "Biscuit" in tokenizer.decode(expected[0, inputs["input_ids"].shape[1] :])
