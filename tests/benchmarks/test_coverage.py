"""The table of what compiles, and the same zoo under other versions."""

import dataclasses

from kvpass.benchmarks import coverage
from kvpass.benchmarks.compat import judge
from kvpass.benchmarks.coverage import Outcome

GOOD = Outcome("llama", "llama", "sdpa", "identical", ("4q/2kv x 16, scale 0.25; causal",) * 2)
VERSIONS = {"torch": "2.13.0", "transformers": "5.24.0"}


def test_implementations_with_one_result_share_a_line():
    """A row that does the same under both implementations is one line; equal layers are counted."""
    lines = coverage.table([GOOD, dataclasses.replace(GOOD, attn="eager")]).splitlines()
    assert lines[2:] == ["| llama | sdpa, eager | identical | 2 × 4q/2kv x 16, scale 0.25; causal |"]


def test_results_survive_the_file(tmp_path):
    """What is written is what is read back."""
    path = tmp_path / "coverage.json"
    coverage.write([GOOD], [dataclasses.replace(GOOD, row="afmoe", family="afmoe")], path)
    data = coverage.read(path)
    assert data["rows"] == [GOOD]
    assert [outcome.row for outcome in data["tried"]] == ["afmoe"]


def test_a_family_that_cannot_be_built_is_reported():
    """Trying a family needs no row: what fails while building is its line in the report."""
    outcome = coverage.attempt("no_such_family")
    assert (outcome.status, outcome.reason) == ("not built", "KeyError: 'no_such_family'")


def test_another_version_is_judged_by_result_not_by_words():
    """A refused row must be refused, in whatever words; a row the version lacks is absent; anything else is bad."""
    rows = [
        GOOD,
        Outcome("lfm2", "lfm2", "sdpa", "refused", reason="in other words"),
        Outcome("olmo3", "olmo3", "sdpa", "not built", reason="KeyError: 'olmo3'"),
        Outcome("gpt2", "gpt2", "sdpa", "refused", reason="no longer read"),
        Outcome("doge", "doge", "sdpa", "identical"),
    ]
    result = judge({"versions": VERSIONS, "rows": rows})
    assert (result.good, result.absent) == (2, ("olmo3/sdpa: KeyError: 'olmo3'",))
    assert result.bad == ("gpt2/sdpa: refused no longer read", "doge/sdpa: identical ")
