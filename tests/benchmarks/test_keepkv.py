"""The KeepKV benchmark on a tiny model."""

import json

import torch

import kvpass
from kvpass.benchmarks import decoding, keepkv
from kvpass.kernels.layout import unpack
from kvpass.policies import KeepKV
from tests.conftest import prompt


def test_a_budget_that_holds_everything_diverges_from_nothing(tiny_model):
    """Forced through a cache that keeps all, predictions are the untouched model's, through a small one not."""
    model, ids = tiny_model("llama"), prompt(70, 2)
    full = decoding.predictions(model, ids, 40)
    assert full.shape[:2] == (40, 2)
    large, small = (
        decoding.divergence(model, ids, full, KeepKV(window=4), budget, None, lambda x, _: x, "") for budget in (80, 12)
    )
    assert abs(large["kl"]) < 1e-6 < small["kl"] and large["maintain_s"] == 0 < small["maintain_s"]
    assert len(small["texts"]) == 2 and len(small["quarters"]) == 4


def test_votes_of_the_ablation(tiny_model):
    """`count` votes by an entry's tokens, `none` not at all; keys and what is kept stay the same."""
    stores = {}
    for votes in ("count", "none"):
        policy = keepkv.Voted(votes=votes, value_fit=False, window=4, threshold=0.0)
        model = kvpass.compile(tiny_model("llama"), budget=12, policy=policy, backend="eager")
        cache = model.kvpass.new_cache()
        with torch.no_grad():
            model(prompt(60), past_key_values=cache)
        stores[votes] = unpack(cache.stores[0])
    count, none = stores.values()
    assert torch.equal(count.k, none.k) and int(count.tokens.max()) > 1
    torch.testing.assert_close(count.log_votes, count.tokens.float().log())
    assert not none.log_votes.any()


def test_parts_add_up_in_one_file(tmp_path, capsys):
    """A part is measured, printed and written; the next goes into the same file, and other settings are refused."""
    file = tmp_path / "keepkv.json"
    given = ["--model", "tiny-llama", "--prompt", "40", "--texts", "1", "--steps", "8", "--decode-budget", "20"]
    assert keepkv.main([*given, "--part", "refresh", "--json", str(file)]) == 0
    assert set(json.loads(file.read_text())) == {"meta", "refresh"}
    assert "16 forced tokens, 1 texts, prompt 40" in capsys.readouterr().out
