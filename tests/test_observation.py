"""What a policy gets to know at run time: frames, output projections, and the hidden states it asked for."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch

import kvpass
from kvpass.budget import Budget
from kvpass.compression import Compress
from kvpass.policies import KeepKV, Streaming
from tests.conftest import greedy, prompt


@dataclass(frozen=True)
class Recorder(Streaming):
    """Streams, and writes down what it is shown."""

    wanted: tuple[int, ...] = ()
    shown: list = field(default_factory=list, compare=False)

    name: ClassVar[str] = "recorder"

    def observe(self, length):
        return 4

    def taps(self, layers):
        return self.wanted

    def compress(self, layers, budget, lengths):
        self.shown.append([seen for _, seen in layers])
        return super().compress(layers, budget, lengths)


def shown(model, ids, mask=None, steps=2, decode_budget=None, wanted=(0, 1), **kwargs):
    """Per compression and layer, what a policy that taps ``wanted`` is shown while tokens are generated."""
    policy = Recorder(window=4, wanted=wanted)
    ours = kvpass.compile(model, budget=0.5, policy=policy, decode_budget=decode_budget, backend="eager")
    greedy(ours, ids, steps, mask, **kwargs)
    return policy.shown


def read_by(module, model, ids, mask):
    """[B, S, E] input of a submodule in the untouched model."""
    found = []
    hook = model.get_submodule(module).register_forward_pre_hook(lambda _, args: found.append(args[0]))
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    hook.remove()
    return found[0]


@pytest.mark.parametrize(
    "name, projection", [("llama", "model.layers.{}.self_attn.k_proj"), ("gpt2", "transformer.h.{}.attn.c_attn")]
)
def test_hidden_states_are_the_attentions_input(tiny_model, name, projection):
    """Tapped layers show what their projections read, column by column, padding marked with -1."""
    model, ids = tiny_model(name), prompt(12, 2)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    ((first, second),) = shown(model, ids, mask)
    for index, seen in enumerate((first, second)):
        expected = read_by(projection.format(index), model, ids, mask)
        real = seen.hidden_pos >= 0
        assert torch.equal(real, mask.bool())
        assert seen.hidden_pos[1, 5:].tolist() == list(range(7))
        assert torch.allclose(seen.hidden[real], expected[real], atol=1e-5)


def test_only_what_was_asked_for(tiny_model):
    """Layers that are not tapped show no hidden states; frames and projections are there in any case."""
    ((first, second),) = shown(tiny_model("llama"), prompt(12), wanted=(1,))
    assert first.hidden is None and first.hidden_pos is None and second.hidden.shape == (1, 12, 64)
    for index, seen in enumerate((first, second)):
        weight = tiny_model("llama").model.layers[index].self_attn.o_proj.weight
        assert seen.turns and float(seen.frame.freq[0]) == pytest.approx(1)
        assert seen.out.shape == (4, 16, 64) and seen.out.data_ptr() == weight.data_ptr()
        assert torch.equal(seen.out[2], weight[:, 32:48].T)


def test_taps_count_full_attention_layers(tiny_model):
    """Sliding layers are not compressed and not counted; a layer that does not exist is an error."""
    model = tiny_model("qwen2_mixed")
    ((only,),) = shown(model, prompt(12), wanted=(0,))
    mask = torch.ones(1, 12, dtype=torch.int64)
    expected = read_by("model.layers.1.self_attn.k_proj", model, prompt(12), mask)
    assert torch.allclose(only.hidden, expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"policy 'recorder' taps layers \(1,\) of 1 full-attention layers"):
        shown(model, prompt(12), wanted=(1,))


def test_a_prompt_in_chunks_shows_the_same(tiny_model):
    """Hidden states of all chunks are there at the compression, as for the whole prompt; of drafted tokens none."""
    model, ids = tiny_model("llama"), prompt(6).repeat(1, 4)
    (whole,) = shown(model, ids)
    for kwargs in ({"prefill_chunk_size": 7}, {"prompt_lookup_num_tokens": 4, "steps": 8}):
        (pieces,) = shown(model, ids, **kwargs)
        for one, other in zip(whole, pieces, strict=True):
            assert one.hidden.shape == other.hidden.shape == (1, 24, 64)
            assert torch.equal(one.hidden_pos, other.hidden_pos)
            assert torch.allclose(one.hidden, other.hidden, atol=1e-5)
            assert torch.allclose(one.q, other.q[:, :, other.q_pos[0] >= 0], atol=1e-5)


def test_a_policy_that_needs_frames(tiny_model):
    """Un-rotated merging runs where keys turn and where they do not; where it is not known how, it is refused."""
    policy = KeepKV(window=4, key_frame="unrotated")
    for name in ("llama", "gpt2"):
        model = kvpass.compile(tiny_model(name), budget=0.3, policy=policy, backend="eager")
        assert greedy(model, prompt(60), 4).shape == (1, 64)
    program = kvpass.compile(tiny_model("llama"), backend="eager").kvpass.runtime.step
    layers = [replace(layer, frame=None) for layer in program.layers]
    with pytest.raises(ValueError, match=r"'keepkv' turns keys back .* for model.layers.0.self_attn; explain"):
        Compress(replace(program, layers=tuple(layers)), policy, Budget.parse(0.3))


def test_while_decoding(tiny_model):
    """A compression while decoding knows frames and projections; hidden states belong to the prompt."""
    before, after = shown(tiny_model("llama"), prompt(24), steps=45, decode_budget=12)[:2]
    for one, other in zip(before, after, strict=True):
        assert other.turns and other.frame is one.frame and torch.equal(other.out, one.out)
        assert other.hidden is None and one.hidden is not None


def test_a_program_from_disk_shows_the_same(tiny_model, tmp_path, monkeypatch):
    """Frames, projections and taps are part of the stored program."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KVPASS_NO_CACHE", raising=False)
    (traced,), (stored,) = (shown(kvpass.models.tiny("gemma3_text"), prompt(12), wanted=(0,)) for _ in range(2))
    for one, other in zip(traced, stored, strict=True):
        for part in ("first", "second", "freq"):
            assert torch.equal(getattr(one.frame, part), getattr(other.frame, part))
        assert one.frame.gain == other.frame.gain and one.turns == other.turns
        assert torch.equal(one.out, other.out) and torch.equal(one.hidden, other.hidden)
