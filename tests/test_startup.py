"""The second start of a model does not trace it."""

import json

import pytest
import torch

import kvpass
from kvpass import compiler, models, startup
from kvpass.models import plain
from tests.conftest import greedy, prompt


@pytest.fixture
def programs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(startup.OFF, raising=False)
    return tmp_path / "kvpass" / "programs"


def never(*_):
    raise AssertionError("traced again")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text"])
def test_a_second_start_says_the_same_without_tracing(programs, monkeypatch, name):
    """A new process's model gets its program from disk: same tokens, same report, no torch.export."""
    first = kvpass.compile(models.tiny(name), budget=0.5, backend="eager")
    assert len(list(programs.iterdir())) == 1
    monkeypatch.setattr(compiler, "capture", never)
    second = kvpass.compile(models.tiny(name), budget=0.5, backend="eager")
    assert torch.equal(greedy(first, prompt(30), 12), greedy(second, prompt(30), 12))
    assert str(first.kvpass.plan) == str(second.kvpass.plan)


def test_whatever_changes_the_program_changes_the_key(programs):
    """Weights, configuration and attention implementation are all in the key."""
    keys = [
        startup.key(model)
        for model in (
            models.tiny("llama"),
            models.tiny("llama", attn="eager"),
            models.tiny("llama", rms_norm_eps=1e-3),
            models.tiny("llama_mha"),
        )
    ]
    assert len(set(keys)) == 4 and startup.key(models.tiny("llama")) == keys[0]


def test_a_damaged_entry_is_traced_again(programs):
    """An entry that is no program, or names an operator that is not allowed, is dropped and made anew."""
    kvpass.compile(models.tiny("llama"), budget=0.5, backend="eager")
    (path,) = programs.iterdir()
    good = path.read_text()
    data = json.loads(good)
    data["program"]["nodes"][-2]["target"] = "os.system.default"
    for damaged in (good[: len(good) // 2], "[]", json.dumps(data)):
        path.write_text(damaged)
        kvpass.compile(models.tiny("llama"), budget=0.5, backend="eager")
        assert json.loads(path.read_text()) == json.loads(good)


def test_a_wrong_entry_is_traced_again(programs):
    """An entry that computes something else is caught by the check that every compile makes, and replaced."""
    kvpass.compile(models.tiny("llama"), budget=0.5, backend="eager")
    (path,) = programs.iterdir()
    good = path.read_text()
    data = json.loads(good)
    attend = next(node for node in data["program"]["nodes"] if node["target"] == "kvpass.attend.default")
    scale = next(i for i, arg in enumerate(attend["args"]["tuple"]) if isinstance(arg, float))
    attend["args"]["tuple"][scale] *= 2
    path.write_text(json.dumps(data))
    kvpass.compile(models.tiny("llama"), budget=0.5, backend="eager")
    assert json.loads(path.read_text()) == json.loads(good)


def test_functions_that_modules_hold_are_in_the_key(programs):
    """Two decoders of one class that differ only in a function, or in what it closes over, have two programs."""

    def scaled(by):
        return lambda q, k, v, keep, scale: plain.attend_sdpa(q, k, v, keep, by * scale)

    keys = [startup.key(plain.decoder(attend)) for attend in (scaled(1.0), scaled(2.0), plain.attend_sdpa)]
    assert len(set(keys)) == 3 and startup.key(plain.decoder(scaled(1.0))) == keys[0]
