"""The benchmark on a tiny decoder: its JSON, its table, and when it refuses."""

import dataclasses
import json
import os

import pytest

from kvpass.benchmarks import roofline, text, throughput, throughput_plot
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
    kv_mib entries kl weight_mib kv_read_mib peak_mib roofline_ms of_roofline
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
    assert [row["row"] for row in result["rows"]] == ["A", "B", "C", "D", "D"]
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
    assert max(map(abs, kl[1:3])) < 1e-6
    assert min(kl[3:]) > 1e-6
    assert result["meta"]["forced_positions"] == 2 * (OPTIONS.steps + throughput.WARM_UP)


def test_entries_and_ratios(result):
    """Entries are what was kept and appended; ratios are of medians, 1 for a row to itself."""
    a, b, c, half, eight = result["rows"]
    appended = OPTIONS.steps + throughput.WARM_UP
    rows = 2 * 2 * 2  # layers, KV heads, sequences
    assert a["entries"] == b["entries"] == c["entries"] == rows * (OPTIONS.length + appended)
    assert half["entries"] == rows * (OPTIONS.length // 2 + appended)
    assert eight["entries"] == rows * (8 + appended)
    assert a["kv_mib"] == pytest.approx(a["entries"] * 2 * 16 * 4 / 2**20)
    assert a["ratio_to_a"] == b["ratio_to_b"] == c["ratio_to_c"] == 1
    assert half["ratio_to_a"] == pytest.approx(
        a["decode_ms_per_token"]["median"] / half["decode_ms_per_token"]["median"]
    )


def test_bytes_that_a_step_reads(result):
    """Weights count once, tied ones too, and KV as entries: the static cache's free slots and our slack are not read;
    a stored entry has a log-vote beside its key and value."""
    a, b, c, half, _ = result["rows"]
    entry = 2 * 16 * 4
    assert a["kv_read_mib"] == b["kv_read_mib"] == a["entries"] * entry / 2**20
    stored = 2 * 2 * 2 * OPTIONS.length
    assert c["kv_read_mib"] == (c["entries"] * entry + stored * 4) / 2**20
    assert half["kv_read_mib"] == (half["entries"] * entry + stored // 2 * 4) / 2**20
    assert a["weight_mib"] == half["weight_mib"] > 0


def test_weights_without_the_embedding(tiny_model):
    """An input embedding that is not the head as well is not read by a step, except for a row."""
    model = tiny_model()
    every = sum(parameter.nbytes for parameter in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    tied = embedding.data_ptr() == head.data_ptr()
    assert roofline.weight_bytes(model) == every - (0 if tied else embedding.nbytes)


def test_roofline_arithmetic():
    """600 MB at 20 GB/s take 30 ms, 60 % of a step of 50 ms; 2 s of compression pay off after 100 steps, each
    20 ms faster, and never when steps are slower."""
    assert roofline.share(600_000_000, 20.0, 50.0) == pytest.approx((30.0, 0.6))
    assert roofline.break_even(2.0, 70.0, 50.0) == pytest.approx(100)
    assert roofline.break_even(2.0, 50.0, 70.0) is None


def _result(load=0.5, after=20.0, anyway=False):
    """What a measurement looks like, with round numbers."""
    meta = {"model": "m", "dtype": "float32", "length": 1000, "batch": 1, "threads": 2, "steps": 8}
    meta |= {"forced_positions": 12, "load_average": load, "anyway": anyway, "read_gb_per_s": [20.0, after]}
    rows = []
    for row, ms, budget in (("A", 80.0, None), ("C", 40.0, 1.0), ("D", 20.0, 0.1)):
        times = {"median": ms, "p10": ms - 1, "p90": ms + 1}
        ratios = {"ratio_to_a": 80 / ms, "ratio_to_b": None, "ratio_to_c": 40 / ms}
        costs = {"prefill_s": 3.0, "compress_s": 0.5, "peak_mib": None, "kl": 0.0, "tokens_per_s": 1e3 / ms}
        sizes = {"kv_mib": ms, "entries": 10, "weight_mib": 500.0, "of_roofline": 0.25}
        own = {"break_even_tokens": 25.0} if row == "D" else {}
        rows.append({"row": row, "policy": budget and "keepkv", "budget": budget, "length": 1000, "batch": 1})
        rows[-1] |= {"decode_ms_per_token": times, **ratios, **costs, **sizes, **own}
    return {"meta": meta, "rows": rows}


TABLE = """
row                 policy    budget      prefill    compress      decode  p10–p90         decode    speed    speed  of its      break-even      KV cache    KV cache    KL to A
                                                s           s    ms/token  ms/token      tokens/s      × A      × C  roofline    tokens               MiB     entries       nats
------------------  --------  --------  ---------  ----------  ----------  ----------  ----------  -------  -------  ----------  ------------  ----------  ----------  ---------
A untouched, eager                           3.00        0.50        80.0  79.0–81.0         12.5     1.00     0.50  25%                             80.0          10          0
C kvpass, all kept            1              3.00        0.50        40.0  39.0–41.0         25.0     2.00     1.00  25%                             40.0          10          0
D kvpass            keepkv    0.1            3.00        0.50        20.0  19.0–21.0         50.0     4.00     2.00  25%         25                  20.0          10          0
m, float32, prompt of 1000 tokens, batch 1, 2 threads; decode is the median over 8 forwards in turns of 4, spread is p10–p90; KL is the mean over the same 12 forced positions.
A step reads 500 MiB of weights and the row's KV entries; the roofline is reading them at 20.0 GB/s, measured in this process before (20.0) and after (20.0) decoding.
"""  # noqa: E501


def test_table():
    """The table names every unit, leaves out columns that nobody filled, and states the setting."""
    assert throughput.table(_result()) == TABLE.strip()


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"load": 9.0}, "busy (load average 9.0)"), ({"after": 17.0}, "20.0 GB/s before decoding and at 17.0 after")],
)
def test_no_ratios_from_a_disturbed_machine(change, reason):
    """A busy machine, or a read bandwidth that moved by more than a tenth, leaves no ratio; --anyway prints them with
    a warning."""
    shown = throughput.table(_result(**change))
    assert (
        "× A" not in shown and "25%" not in shown and f"No ratios: {'the machine was ' * ('load' in change)}" in shown
    )
    assert reason in shown
    asked = throughput.table(_result(**change, anyway=True))
    assert "× A" in asked and "do not trust" in asked
    assert throughput.table(_result(after=18.1)) != throughput.table(_result()) and "× A" in throughput.table(
        _result(after=18.1)
    )


def test_plot_lines():
    """A plot has a line for each row, policy and budget, ordered by length."""
    long, short = _result(), _result()
    for result, length in ((long, 2000), (short, 1000)):
        for row in result["rows"]:
            row["length"] = length
    found = throughput_plot.lines([long, short])
    assert list(found) == ["A untouched, eager", "C kvpass, all kept", "D kvpass, keepkv 0.1"]
    assert all([row["length"] for row in rows] == [1000, 2000] for rows in found.values())


def test_plot_is_a_png(tmp_path):
    """The plot is written as a PNG."""
    pytest.importorskip("matplotlib")
    throughput_plot.plot([_result()], tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


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
        ({"rows": ("A", "D")}, "rows A and C"),
        ({"rows": ("A", "C", "Z")}, "unknown row 'Z'"),
    ],
)
def test_bad_options(change, message):
    """What cannot be measured is refused in a sentence."""
    with pytest.raises(ValueError, match=message):
        throughput.run(dataclasses.replace(OPTIONS, anyway=True, **change))
