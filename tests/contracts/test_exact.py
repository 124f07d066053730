"""Budget 1 is exact."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import kvpass
from tests.conftest import greedy, prompt

FAMILIES = ["llama", "mistral", "qwen2", "gpt2", "phi", "opt", "llama_mqa", "qwen2_mixed"]


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_budget_one_gives_the_untouched_models_tokens(tiny_model, compiled, name, attn):
    """At budget 1.0 32 greedy tokens equal the untouched model's, for prompts of 1, 2, 3 and 40 tokens, batch 1 and 3,
    windows shorter than the prompt included, and for a batch with left padding."""
    model, ours = tiny_model(name, attn), compiled(name, budget=1.0, attn=attn)
    for length in (1, 2, 3, 40):
        for batch in (1, 3):
            ids = prompt(length, batch, seed=length)
            assert torch.equal(greedy(ours, ids, 32), greedy(model, ids, 32)), (length, batch)
    ids, mask = prompt(20, 3), torch.ones(3, 20, dtype=torch.int64)
    mask[0, :7], mask[2, :1] = 0, 0
    assert torch.equal(greedy(ours, ids, 32, mask), greedy(model, ids, 32, mask))


def test_all_logits_equal(tiny_model, compiled):
    """At budget 1.0 a plain call returns every position's logits, and logits_to_keep the last ones."""
    model, ours, ids = tiny_model("llama"), compiled("llama", budget=1.0), prompt(30, 2)
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(ours(ids).logits, expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(ours(ids, logits_to_keep=3).logits, expected[:, -3:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("policy", ["streaming", "snapkv", "keepkv"])
@pytest.mark.parametrize("budget", [0.05, 0.3, 4])
def test_the_first_token_is_the_full_caches(tiny_model, compiled, policy, budget):
    """At every budget the first new token's logits are the untouched model's: compression comes after attention."""
    ids = prompt(50, 2)
    with torch.no_grad():
        ours = compiled("llama", budget=budget, policy=policy)(ids).logits
        torch.testing.assert_close(ours, tiny_model("llama")(ids).logits, rtol=0, atol=1e-4)


def test_without_a_compiler(tmp_path):
    """Without the C++ kernels budget 1 is as exact, and the report says what serves instead."""
    code = (
        "import torch, kvpass; from kvpass import models; from tests.conftest import greedy, prompt;"
        "model = models.tiny('llama'); ours = kvpass.compile(model, budget=1.0, backend='eager');"
        "ids = prompt(30, 2); assert torch.equal(greedy(ours, ids, 16), greedy(model, ids, 16));"
        "print(ours.kvpass.report())"
    )
    environment = {**os.environ, "KVPASS_NO_CPP": "1", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    assert "attention by packed SDPA (" in done.stdout


CAPPED_AND_SUNK = {
    "gemma2": {"sliding_window": 8},  # soft cap, and every second layer slides
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},  # sinks, and a router's softmax
}


@pytest.mark.parametrize("family", CAPPED_AND_SUNK)
def test_soft_caps_and_sinks(family):
    """Models whose logits are capped, or whose softmax has sinks, give the untouched model's tokens at budget 1.0."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **shape, **CAPPED_AND_SUNK[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    sites = kvpass.explain(model)
    assert all(("softcap 50" if family == "gemma2" else "sinks") in row.attention for row in sites.rows[:2])
    ours = kvpass.compile(model, budget=1.0, backend="eager")
    ids, mask = prompt(30, 2), torch.ones(2, 30, dtype=torch.int64)
    mask[0, :5] = 0
    assert torch.equal(greedy(ours, ids, 24, mask), greedy(model, ids, 24, mask))
