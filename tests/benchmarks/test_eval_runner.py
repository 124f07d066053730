"""An evaluation from settings to tables: resumed, repeated, on hostile text; and its statistics by hand."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest

from kvpass import cli
from kvpass.benchmarks.eval import runner, tables
from kvpass.benchmarks.eval.runner import run, without_times
from kvpass.benchmarks.eval.settings import Protocol, Settings
from kvpass.benchmarks.eval.shards import Shard
from kvpass.benchmarks.eval.statistics import interval, summarise

SETTINGS = Settings(
    model="tiny-llama",
    policies=("streaming", "snapkv", "oracle"),
    budgets=(0.5, 0.2),
    tasks=("pydoc",),
    lengths=(100,),
    samples=(3,),
    jobs=1,
    protocol=Protocol(gold=24),
)


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    """(folder, result) of a whole run."""
    out = tmp_path_factory.mktemp("eval")
    return out, run(SETTINGS, out, (tiny_model(), None))


def test_deterministic(finished, tiny_model, tmp_path):
    """The same settings in another folder give the same JSON, apart from times."""
    _, first = finished
    second = run(SETTINGS, tmp_path, (tiny_model(), None))
    assert json.dumps(without_times(first), allow_nan=False) == json.dumps(without_times(second), allow_nan=False)
    assert len(first["rows"]) == 3 * 3 * 2
    assert first["meta"]["settings"]["seed"] == 0 and len(first["meta"]["model_hash"]) == 64


class Killed(BaseException):
    """Ends a run the way a signal does."""


def test_resume(finished, tiny_model, tmp_path, monkeypatch):
    """A run killed after one sample, with a half-written shard left, repeats no finished sample and ends the same."""
    calls = []
    measure = runner.measure

    def dies_at_the_second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise Killed
        return measure(*args)

    monkeypatch.setattr(runner, "measure", dies_at_the_second)
    with pytest.raises(Killed):
        run(SETTINGS, tmp_path, (tiny_model(), None))
    monkeypatch.undo()
    (shard,) = (tmp_path / "shards").glob("*.jsonl")
    before = shard.stat().st_mtime_ns
    Shard(tmp_path / "shards" / "half.jsonl").write([])
    (tmp_path / "shards" / ".half").write_text('{"task": ')
    result = run(SETTINGS, tmp_path, (tiny_model(), None))
    assert shard.stat().st_mtime_ns == before
    assert without_times(result) == without_times(finished[1])


def test_only_what_is_missing(finished, tiny_model, tmp_path):
    """One more policy is measured alone: the others' rows, times included, are those of the first run."""
    less = dataclasses.replace(SETTINGS, policies=("streaming",), budgets=(0.2,))
    first = run(less, tmp_path, (tiny_model(), None))
    more = run(dataclasses.replace(less, policies=("streaming", "snapkv")), tmp_path, (tiny_model(), None))
    assert [row for row in more["rows"] if row["policy"] == "streaming"] == first["rows"]
    assert len(more["rows"]) == 6


def test_damaged_shard(tmp_path):
    """A shard cut off in a line counts as absent."""
    shard = Shard.of(tmp_path, "anything")
    shard.write([{"kl": 1.0}, {"kl": 2.0}])
    assert shard.read() == [{"kl": 1.0}, {"kl": 2.0}]
    shard.path.write_text(shard.path.read_text()[:-5])
    assert shard.read() == []


def test_tables(finished):
    """Every table states model, protocol, accounting, samples and bytes; policies that know the future have no rank."""
    _, result = finished
    shown = tables.tables(result)
    for part in ("tiny-llama", "question-aware", "prefix and question exact and free", "3 samples", "KL", "bytes"):
        assert part in shown
    ranks = {entry["policy"]: entry["rank"] for entry in result["summary"] if entry["budget"] == 0.2}
    assert ranks["oracle"] is None and {ranks["streaming"], ranks["snapkv"]} <= {1, 2}


HOSTILE = {
    "braces": "{context} {0} {{x}} %s $HOME",
    "html": "<script>alert(1)</script>&amp;",
    "controls": "\x00\x1b[2J\r\n\u202e\ufeff\u2028",
    "path": "../../../../etc/passwd",
    "code": "__import__('os').system('touch pwned')",
    "special": "<|im_end|><|im_start|>system",
}


def test_hostile_rows(tiny_model, tmp_path):
    """Braces, HTML, control characters, paths, code and a line of 10 MB are text: measured like any other."""
    file = tmp_path / "rows.jsonl"
    rows = [{"context": text * 3, "question": text, "answers": [text + " yes"]} for text in HOSTILE.values()]
    rows.append({"context": "long " * 2_000_000, "question": "How long?", "answers": ["very long"]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = dataclasses.replace(SETTINGS, jsonl=file, lengths=(300,), policies=("snapkv",), budgets=(0.5,))
    result = run(settings, tmp_path / "out", (tiny_model(), None))
    assert len(result["rows"]) + len(result["skipped"]) == len(rows) and len(result["rows"]) >= 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows.jsonl"]
    tables.tables(result)


def test_command(tmp_path, capsys):
    """The command prints tables, writes JSON and the same table beside it, and exits with 0; mistakes exit with 2."""
    flags = ["--model", "tiny-llama", "--task", "pydoc", "--length", "100", "--samples", "1", "--gold", "8"]
    flags += ["--policy", "streaming", "--budget", "0.5", "--jobs", "1", "--out", str(tmp_path)]
    assert cli.main(["eval", *flags]) == 0
    shown = capsys.readouterr().out
    assert "streaming" in shown and (tmp_path / "table.txt").read_text() == shown
    assert len(json.loads((tmp_path / "result.json").read_text())["rows"]) == 1
    for wrong, reason in (
        (["--task", "nothing"], "unknown task"),
        (["--samples", "0"], "samples must be"),
        (["--few", "streaming=0"], "few is"),
    ):
        assert cli.main(["eval", *flags, *wrong]) == 2
        assert reason in capsys.readouterr().err


def test_samples_a_length(tiny_model, tmp_path):
    """Each length may have a number of samples of its own; tasks of a family take turns where a policy has few."""
    settings = dataclasses.replace(SETTINGS, lengths=(100, 120), samples=(2, 1), few=(("oracle", 3),))
    settings = dataclasses.replace(settings, tasks=("pydoc", "language"), budgets=(0.5,))
    rows = run(settings, tmp_path, (tiny_model(), None))["rows"]
    wanted = {("pydoc", 100): 2, ("language", 100): 1, ("pydoc", 120): 1, ("language", 120): 1}
    assert Counter((row["task"], row["length"]) for row in rows if row["policy"] == "oracle") == wanted
    wanted = {(task, length): 2 if length == 100 else 1 for task, length in wanted}
    assert Counter((row["task"], row["length"]) for row in rows if row["policy"] == "snapkv") == wanted
    with pytest.raises(ValueError, match="one number or one for each length"):
        run(dataclasses.replace(settings, samples=(1, 2, 3)), tmp_path, (tiny_model(), None))


def test_few_and_minutes(finished, tiny_model, tmp_path):
    """A slow policy is measured on fewer samples and the table says so, as it does of samples that were not reached."""
    result = run(dataclasses.replace(SETTINGS, few=(("oracle", 1),)), tmp_path, (tiny_model(), None))
    own = [row for row in finished[1]["rows"] if row["policy"] != "oracle" or row["id"] == result["rows"][0]["id"]]
    assert [(row["policy"], row["id"], row["kl"]) for row in result["rows"]] == [
        (row["policy"], row["id"], row["kl"]) for row in own
    ]
    assert "oracle (1 samples)" in tables.tables(result)
    late = dataclasses.replace(SETTINGS, minutes=1e-9, policies=(*SETTINGS.policies, "tova"))
    result = run(late, tmp_path, (tiny_model(), None))
    assert [sample["skipped"] for sample in result["skipped"]] == ["not reached in the minutes given"] * 3
    assert len(result["rows"]) == 3 * 3 * 2 - 2 * 2  # what was measured before is there
    assert "3 samples skipped: not reached in the minutes given" in tables.tables(result)


@pytest.mark.slow
def test_workers(finished, tmp_path):
    """Two worker processes give what one gives."""
    result = run(dataclasses.replace(SETTINGS, jobs=2), tmp_path)
    assert without_times(result)["rows"] == without_times(finished[1])["rows"]


def test_plot(finished, tmp_path):
    """The plot is a PNG, where matplotlib is installed."""
    pytest.importorskip("matplotlib")
    from kvpass.benchmarks.eval.plot import plot

    plot(finished[1], tmp_path / "quality.png")
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")


def test_interval_by_hand():
    """Three resamples of two values: means 1, 2 and 3, whose 2.5 and 97.5 percentiles are 1.05 and 2.95."""
    draws = np.array([[0, 0], [0, 1], [1, 1]])
    assert interval(np.array([1.0, 3.0]), draws) == pytest.approx([2, 1.05, 2.95])
    # Ratios of sums 1/2, 4/6 and 3/4.
    low, high = 0.5 + 0.05 / 6, 0.75 - 0.05 / 12
    assert interval(np.array([1.0, 3.0]), draws, np.array([2.0, 4.0])) == pytest.approx([4 / 6, low, high])


def row(policy, sample, kl, family="qa", **more):
    base = {"task": family, "id": sample, "family": family, "length": 9, "budget": 0.5, "policy": policy, "kl": kl}
    base |= {"nll": 2.0, "nll_full": 1.0, "nll_without": 3.0, "delta": 1.0, "agreement": 0.5, "future": False}
    return base | {"exact": False, "exact_full": True, "entries": 4, "bytes": 10, "bytes_full": 20} | more


def test_summary_by_hand():
    """Pairs, ranks, retention and kept answers of three policies on two samples; families stay apart."""
    rows = [
        row("a", "1", 1.0),
        row("a", "2", 3.0, exact=True),
        row("b", "1", 2.0, exact_full=False),
        row("b", "2", 4.0),
    ]
    rows += [row("seer", s, 0.1, future=True, nll=1.0, delta=0.0) for s in "12"]
    rows += [row("a", "3", 9.0), row("a", "1", 7.0, family="language")]
    summary = {(e["group"], e["policy"]): e for e in summarise(rows, 0) if e["by"] == "family"}
    a, b, seer = (summary["qa", name] for name in ("a", "b", "seer"))
    assert a["n"] == 2 and a["kl"][0] == 2 and b["kl"][0] == 3  # sample 3 has no partner
    assert (a["rank"], b["rank"], seer["rank"], a["best"]) == (1, 2, None, "a")
    assert b["kl_above_best"] == pytest.approx([1, 1, 1])  # always one worse, whatever is drawn
    assert a["retention"] == pytest.approx([0.5, 0.5, 0.5]) and seer["retention"][0] == 1
    assert (a["solved"], a["kept"]) == (2, 0.5) and (b["solved"], b["kept"]) == (1, 0)
    assert summary["language", "a"]["kl"] == [7, 7, 7]
    lacking = {e["policy"]: e for e in summarise(rows[1:6], 0, few=("a",)) if e["by"] == "family"}
    assert (lacking["a"]["n"], lacking["a"]["rank"], lacking["b"]["n"], lacking["b"]["rank"]) == (1, None, 2, 1)
    assert lacking["a"]["kl_above_best"][0] == -1  # against b on the one sample that both have
