"""`generate` as people use it."""

import pytest
import torch
from transformers import StaticCache, TextStreamer

from tests.conftest import greedy, prompt


def reference_tokens(model, ids, steps, choose):
    """Token by token through plain calls on one cache: what any generation strategy must reproduce."""
    cache = model.kvpass.new_cache()
    out, piece = ids, ids
    with torch.no_grad():
        for _ in range(steps):
            logits = model(piece, past_key_values=cache, logits_to_keep=1).logits[:, -1]
            piece = choose(logits)
            out = torch.cat([out, piece], 1)
    return out


def test_greedy_equals_plain_calls(compiled):
    """generate() is the loop one would write by hand."""
    model, ids = compiled("llama"), prompt(30, 2)
    expected = reference_tokens(model, ids, 20, lambda logits: logits.argmax(-1, keepdim=True))
    assert torch.equal(greedy(model, ids, 20), expected)


def test_sampling_with_a_seed(compiled):
    """Sampling draws what the same seed draws by hand."""
    model, ids = compiled("llama"), prompt(30, 2)
    torch.manual_seed(7)
    expected = reference_tokens(model, ids, 12, lambda logits: torch.multinomial(logits.softmax(-1), 1))
    torch.manual_seed(7)
    actual = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=12, pad_token_id=0, top_k=0
    )
    assert torch.equal(actual, expected)


def test_beams_equal_the_untouched_model(tiny_model, compiled):
    """Beam search at budget 1.0 gives the untouched model's beams."""
    ids = prompt(20, 2)
    for name in ("llama", "mistral"):
        model, ours = tiny_model(name), compiled(name, budget=1.0)
        assert torch.equal(greedy(ours, ids, 12, num_beams=4), greedy(model, ids, 12, num_beams=4))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2_mixed"])
def test_prompt_lookup_equals_greedy(compiled, name):
    """Prompt-lookup decoding, which appends several tokens and crops some, says what greedy decoding says."""
    model = compiled(name, budget=0.5)
    ids = prompt(6).repeat(1, 6)
    assert torch.equal(greedy(model, ids, 24, prompt_lookup_num_tokens=4), greedy(model, ids, 24))


def test_assistant_model_equals_greedy(tiny_model, compiled):
    """Assisted decoding with another model gives the same tokens."""
    model, ids = compiled("llama", budget=0.5), prompt(30)
    assert torch.equal(greedy(model, ids, 16, assistant_model=tiny_model("llama_mqa")), greedy(model, ids, 16))


def test_several_sequences_per_prompt(compiled):
    """num_return_sequences expands the batch, each with its own tail."""
    model, ids = compiled("llama"), prompt(20, 2)
    torch.manual_seed(0)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        num_return_sequences=3,
        max_new_tokens=5,
        pad_token_id=0,
    )
    assert out.shape == (6, 25)


@pytest.mark.parametrize("name", ["llama", "qwen2_mixed"])
def test_a_conversation_goes_on_without_reading_again(tiny_model, compiled, name):
    """A second generate() with the first one's cache reads only the new tokens, and at budget 1.0 says what the
    untouched model says about the whole conversation."""
    model, ours = tiny_model(name), compiled(name, budget=1.0)
    cache = ours.kvpass.new_cache()
    keyword = {"cache" if "cache" in ours.forward.__signature__.parameters else "past_key_values": cache}
    first = greedy(ours, prompt(20, 2), 8, **keyword)
    whole = torch.cat([first, prompt(9, 2, seed=5)], 1)
    assert torch.equal(greedy(ours, whole, 8, **keyword), greedy(model, whole, 8))
    assert cache.get_seq_length() == 20 + 8 + 9 + 8 - 1


def test_eos_streamer_and_returned_cache(compiled):
    """Every EOS id stops, a streamer sees the tokens, and the returned cache is ours."""

    class Words:
        def __init__(self):
            self.seen = []

        def put(self, value):
            self.seen += value.flatten().tolist()

        def end(self):
            self.seen.append("end")

    model, ids = compiled("llama"), prompt(20)
    free = greedy(model, ids, 12)[0, 20:].tolist()
    stop = free[5]
    streamer = Words()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=[1, stop],
        pad_token_id=0, streamer=streamer, return_dict_in_generate=True,
    )  # fmt: skip
    tokens = out.sequences[0, 20:].tolist()
    assert tokens == free[: free.index(stop) + 1]
    assert streamer.seen == [*ids[0].tolist(), *tokens, "end"]
    cache = out.past_key_values if hasattr(out, "past_key_values") else out.cache
    assert type(cache).__name__ == "RaggedCache" and cache.get_seq_length() == 20 + len(tokens) - 1
    assert TextStreamer is not None


def test_an_interrupted_generate_leaves_nothing_behind(compiled):
    """Ctrl-C in the middle of generate: the next call says what it says on a fresh model."""
    model, ids = compiled("qwen2_mixed"), prompt(20)
    expected = greedy(model, ids, 8)

    def interrupt(tokens, scores, **kwargs):
        if tokens.shape[1] > 23:
            raise KeyboardInterrupt
        return torch.zeros(tokens.shape[0], dtype=torch.bool)

    cache = model.kvpass.new_cache()
    name = "cache" if "cache" in model.forward.__signature__.parameters else "past_key_values"
    with pytest.raises(KeyboardInterrupt):
        greedy(model, ids, 8, stopping_criteria=[interrupt], **{name: cache})
    assert cache.prompt_end is None and cache.get_seq_length() == 23
    assert torch.equal(greedy(model, ids, 8), expected)


def test_the_report_after_generate(compiled):
    """print(model.kvpass.report()) after generate shows entries, bytes, votes and times."""
    model, ids = compiled("llama", budget=0.3, policy="snapkv"), prompt(50)
    greedy(model, ids, 8)
    report = model.kvpass.report()
    assert report.entries == 4 * 15 + 4 * 7 and report.full_entries == 4 * 57
    assert "MiB of storage" in str(report) and report.seconds["decoded"] == 7


@pytest.mark.parametrize("cache", ["static", "offloaded", "quantized"])
def test_another_cache_implementation_is_refused(compiled, cache):
    """A cache implementation that cannot be combined with ours is refused in one sentence."""
    with pytest.raises(ValueError, match="is not possible on a compiled model, which has its own cache"):
        greedy(compiled("llama"), prompt(4), 2, cache_implementation=cache)


def test_a_foreign_cache_is_refused(tiny_model, compiled):
    """A cache that another model filled is refused, and so is a static one."""
    ids = prompt(5)
    with torch.no_grad():
        output = tiny_model("llama")(ids, use_cache=True)
        foreign = output.past_key_values if hasattr(output, "past_key_values") else output.cache
        with pytest.raises(ValueError, match="cannot continue from a DynamicCache with 5 tokens"):
            compiled("llama")(ids, past_key_values=foreign)
        static = StaticCache(config=tiny_model("llama").config, max_cache_len=16)
        with pytest.raises(ValueError, match="cannot continue from a StaticCache"):
            compiled("llama")(ids, past_key_values=static)
        other = compiled("qwen2").kvpass.new_cache()
        with pytest.raises(ValueError, match="made by another compiled model"):
            compiled("llama")(ids, past_key_values=other)
