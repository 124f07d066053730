"""The benchmark on a tiny decoder: its JSON, its table, and when it refuses."""

import dataclasses
import json
import os

import pytest

from kvpass.benchmarks import text, throughput
from kvpass.benchmarks.throughput import BusyError, Options

OPTIONS = Options(
    model="tiny-llama", length=40, batch=2, budgets=(0.5, 8), policies=("snapkv",), steps=6, backend="eager"
)
META = """
    python torch transformers kvpass threads model seed load_average length batch steps platform date
    forced_positions
"""
ROW = """
    row policy budget length batch prefill_s compress_s decode_ms_per_token tokens_per_s ratio_to_a ratio_to_c
    kv_mib entries kl
"""


@pytest.fixture(scope="module")
def result(tiny_model, compiled):
    def build(budget, policy):
        return compiled(budget=budget, policy=policy)

    return throughput.measure(tiny_model(), None, OPTIONS, build, load=0.5)


def test_schema(result):
    """The JSON has the keys that it promises, every sample included, and can be written."""
    assert set(result) == {"meta", "rows"}
    assert set(META.split()) <= set(result["meta"])
    assert [row["row"] for row in result["rows"]] == ["A", "C", "D", "D"]
    for row in result["rows"]:
        assert set(ROW.split()) <= set(row)
        times = row["decode_ms_per_token"]
        assert len(times["samples"]) == OPTIONS.steps
        assert 0 < times["p10"] <= times["median"] <= times["p90"]
        assert row["tokens_per_s"] == pytest.approx(2e3 / times["median"])
    json.dumps(result, allow_nan=False)


def test_divergence(result):
    """Row A does not diverge from itself, everything kept does not diverge, less kept does."""
    kl = [row["kl"] for row in result["rows"]]
    assert kl[0] == 0
    assert abs(kl[1]) < 1e-6
    assert min(kl[2:]) > 1e-6
    assert result["meta"]["forced_positions"] == 2 * (OPTIONS.steps + throughput.WARM_UP)


def test_entries_and_ratios(result):
    """Entries are what was kept and appended; ratios are of medians, 1 for a row to itself."""
    a, c, half, eight = result["rows"]
    appended = OPTIONS.steps + throughput.WARM_UP
    rows = 2 * 2 * 2  # layers, KV heads, sequences
    assert a["entries"] == c["entries"] == rows * (OPTIONS.length + appended)
    assert half["entries"] == rows * (OPTIONS.length // 2 + appended)
    assert eight["entries"] == rows * (8 + appended)
    assert a["kv_mib"] == pytest.approx(a["entries"] * 2 * 16 * 4 / 2**20)
    assert a["ratio_to_a"] == c["ratio_to_c"] == 1
    assert half["ratio_to_a"] == pytest.approx(
        a["decode_ms_per_token"]["median"] / half["decode_ms_per_token"]["median"]
    )


def test_table(result):
    """The table names every unit and states the setting, and says so when the machine was busy."""
    quiet = {**result, "meta": {**result["meta"], "load_average": 0.1}}
    shown = throughput.table(quiet)
    for part in (
        "ms/token",
        "tokens/s",
        "MiB",
        "nats",
        "tiny-llama",
        "40 tokens",
        "batch 2",
        "float32",
        "p10–p90",
    ):
        assert part in shown
    assert "busy" not in shown
    assert "busy" in throughput.table({**result, "meta": {**result["meta"], "load_average": 9.0}})


def test_seed():
    """The same seed gives the same prompts, another seed and another row give others."""
    one, same, other = (text.prompt(None, 128, 30, 2, seed).tolist() for seed in (1, 1, 2))
    assert one == same != other
    assert one[0] != one[1] and {len(row) for row in one} == {30}


def test_same_seed_same_forced_tokens(result, tiny_model, compiled):
    """Two runs with one seed force the same tokens."""
    less = dataclasses.replace(OPTIONS, budgets=())
    again = throughput.measure(
        tiny_model(), None, less, lambda budget, policy: compiled(budget=budget, policy=policy), 0.5
    )
    assert again["meta"]["forced_tokens"] == result["meta"]["forced_tokens"]


def test_refuses_when_busy(monkeypatch):
    """A busy machine is refused before any work, unless asked to measure anyway."""
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    with pytest.raises(BusyError, match=r"load average 3\.0.*--anyway"):
        throughput.run(OPTIONS)
    dataclasses.replace(OPTIONS, anyway=True).check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": ("magic",)}, "unknown policy"),
        ({"budgets": (1.5,)}, "budget must be"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"model": "nothing"}, "unknown model"),
        ({"length": 600}, "512 positions"),
    ],
)
def test_bad_options(change, message):
    """What cannot be measured is refused in a sentence."""
    with pytest.raises(ValueError, match=message):
        throughput.run(dataclasses.replace(OPTIONS, anyway=True, **change))
