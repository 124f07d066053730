"""The command line: exit codes, messages, JSON."""

import json
import os
import subprocess
import sys

import pytest

import kvpass
from kvpass import cli, demo
from kvpass.report import Report, Row


@pytest.fixture
def explained(monkeypatch):
    """Make ``explain`` answer with a report of one row, so that only the command is under test."""

    def fix(status: str):
        report = Report((Row("layers.0", status, note="because"),))
        monkeypatch.setattr(kvpass, "explain", lambda model: report, raising=False)

    return fix


@pytest.mark.parametrize("command", [[], ["explain"], ["demo"], ["bench"], ["eval"], ["view"]])
def test_help_is_instant(command):
    """Help loads neither torch nor transformers."""
    code = (
        "import sys\nfrom kvpass.cli import main\n"
        f"try: main({[*command, '--help']!r})\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "usage: kvpass" in shown


def test_explains(capsys):
    """A supported model: one row a layer, exit code 0."""
    assert cli.main(["explain", "tiny-llama"]) == 0
    shown = capsys.readouterr().out
    assert "model.layers.1.self_attn" in shown and "can be rewritten" in shown


@pytest.mark.parametrize(("status", "code"), [("found", 0), ("refused", 1)])
def test_explain_json(explained, status, code, capsys, tmp_path):
    """--json is the report as JSON, printed or in a file; the exit code says whether it is refused."""
    explained(status)
    assert cli.main(["explain", "tiny-llama", "--json"]) == code
    printed = json.loads(capsys.readouterr().out)
    assert printed["supported"] is (code == 0) and printed["layers"][0]["layer"] == "layers.0"
    assert cli.main(["explain", "tiny-llama", "--json", str(tmp_path / "x.json")]) == code
    assert json.loads((tmp_path / "x.json").read_text()) == printed
    assert capsys.readouterr().out == ""


def test_explain_untraceable(monkeypatch, capsys):
    """A model without a graph to report on still gets its reason and exit code 1."""
    from kvpass.passes.spec import Refusal

    def refuse(model):
        raise kvpass.UnsupportedModelError((Refusal("it cannot be traced"),))

    monkeypatch.setattr(kvpass, "explain", refuse, raising=False)
    assert cli.main(["explain", "tiny-llama"]) == 1
    assert "it cannot be traced" in capsys.readouterr().out


def test_explain_directory(explained, tiny_model, tmp_path):
    """A directory of a checkpoint is a model too."""
    explained("found")
    tiny_model().save_pretrained(tmp_path)
    assert cli.main(["explain", str(tmp_path), "--attn", "eager"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "no-such-model"], "unknown model 'no-such-model'"),
        (["explain", "EMPTY"], "cannot load a decoder"),
        (["bench", "--anyway", "--model", "no-such-model"], "unknown model"),
        (["bench", "--anyway", "--policy", "magic"], "unknown policy 'magic'; known: streaming"),
        (["bench", "--anyway", "--budget", "0"], "budget must be"),
        (["bench", "--anyway", "--length", "0"], "length must be at least 1"),
        (["demo", "--policy", "magic"], "unknown policy"),
        (["demo", "--budgets", "-0.5"], "budget must be"),
        (["demo", "--length", "5"], "length must be at least 200"),
    ],
)
def test_bad_usage(arguments, message, capsys, tmp_path):
    """A mistake is one sentence on standard error and exit code 2."""
    assert cli.main([str(tmp_path) if part == "EMPTY" else part for part in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("kvpass: ") and err.count("\n") == 1


def test_bad_argument():
    """An unknown command is exit code 2."""
    with pytest.raises(SystemExit) as end:
        cli.main(["frobnicate"])
    assert end.value.code == 2


def test_interrupt(monkeypatch):
    """Ctrl-C ends with exit code 130 and no traceback."""

    def interrupted(model):
        raise KeyboardInterrupt

    monkeypatch.setattr(kvpass, "explain", interrupted, raising=False)
    assert cli.main(["explain", "tiny-llama"]) == 130


def test_bug_is_not_hidden(monkeypatch):
    """An error that is not the user's keeps its traceback."""

    def broken(model):
        raise RuntimeError("a bug")

    monkeypatch.setattr(kvpass, "explain", broken, raising=False)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["explain", "tiny-llama"])


def test_bench_when_busy(monkeypatch, capsys):
    """A busy machine gets a sentence and exit code 3."""
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    assert cli.main(["bench", "--model", "tiny-llama"]) == 3
    assert "--anyway" in capsys.readouterr().err


def test_bench_writes_json(tiny_model, monkeypatch, capsys, tmp_path):
    """`kvpass bench` prints the table and writes the same rows as JSON."""
    monkeypatch.setattr("kvpass.models.load", lambda name: (tiny_model(), None))
    arguments = ["bench", "--length", "20", "--steps", "2", "--backend", "eager", "--anyway", "--json"]
    assert cli.main([*arguments, str(tmp_path / "x.json")]) == 0
    assert "ms/token" in capsys.readouterr().out
    assert [row["row"] for row in json.loads((tmp_path / "x.json").read_text())["rows"]] == ["A", "B", "C", "D"]


@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_answers_fit_the_terminal(width):
    """Answers stand side by side and no line is wider than the terminal."""
    answers = [demo.Answer(f"budget {n}", "word " * 30, 1.5, 1000 * n) for n in range(1, 5)]
    shown = demo.columns(answers, width)
    assert max(map(len, shown.splitlines())) <= width
    assert shown.count("word") == 120
    assert all(f"budget {n}" in shown for n in range(1, 5))
