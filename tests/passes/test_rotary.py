"""How keys turn with their position, read from the graph, against the keys that the model itself caches."""

import math

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import kvpass
from kvpass.kernels.frame import Frame
from kvpass.models import tiny
from kvpass.models.seed import seeded
from kvpass.passes.capture import capture
from kvpass.passes.find import find
from kvpass.passes.inputs import inputs
from kvpass.passes.normalize import normalize

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 1024, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GQA = {"num_key_value_heads": 2, "head_dim": 16}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 4, "first_k_dense_replace": 1,
}  # fmt: skip
ROTARY = {  # name: model type, settings, the largest position of its tables, the factor on stored keys
    "rotate-half": ("llama", GQA, 30000, 1),
    "llama3 scaling": ("llama", {**GQA, "rope_parameters": LLAMA3}, 30000, 1),
    "yarn": ("llama", {**GQA, "rope_parameters": YARN}, 30000, 0.1 * math.log(4) + 1),
    "partial": ("phi", {}, 30000, 1),
    "partial, fused qkv": ("gpt_neox", {}, 30000, 1),
    "interleaved, from a table": ("gptj", {"rotary_dim": 4}, 1023, 1),
    "interleaved after a norm per head": ("cohere", {**GQA, "use_qk_norm": True}, 30000, 1),
    "interleaved and partial": ("glm", {**GQA, "pad_token_id": 0}, 30000, 1),
    "complex numbers": ("llama4_text", {**GQA, "num_local_experts": 2, "no_rope_layers": [1]}, 30000, 1),
}


def analysed(kind, **settings):
    """A one-layer decoder of transformers, and its sites."""
    config = AutoConfig.for_model(kind, **{**SHAPE, **settings})
    model = seeded(lambda: AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32))
    return model, sites(model)


def sites(model):
    found = inputs(find(normalize(capture(model))))
    assert not found.refusals
    return found.sites


def cached(model, ids, positions):
    """What each layer caches of N sequences of one token each, at any position."""
    with torch.no_grad():
        cache = model(ids[:, None], position_ids=positions[:, None], use_cache=True).past_key_values
    return cache.layers


def check(model, frames, last, part="keys"):
    """Keys the model caches are its keys at position 0, turned; and turned back they are those."""
    generator = torch.Generator().manual_seed(1)
    positions = torch.randint(0, last + 1, (24,), generator=generator)
    positions[:4] = torch.tensor([1, min(5000, last), last, 0])
    ids = torch.randint(0, 60, positions.shape, generator=generator)
    by = positions.view(-1, 1, 1)
    layers = zip(cached(model, ids, torch.zeros_like(positions)), cached(model, ids, positions), strict=True)
    for frame, (at_zero, stored) in zip(frames, layers, strict=True):
        start, key = getattr(at_zero, part), getattr(stored, part)
        # The model computes fp32 angles, off by up to half an ulp of the position; the frame's are fp64.
        allowed = (1e-5 + 2.5e-7 * by.unsqueeze(-1)) * start.abs().max()
        assert ((frame.turn(start, by) - key).abs() <= allowed).all()
        assert ((frame.turn(key, -by) - start).abs() <= allowed).all()
        assert (key - start).abs().max() > 0.1 * start.abs().max()


@pytest.mark.parametrize("spelling", ROTARY)
def test_the_frame_is_the_models_own_rotation(spelling):
    """Whatever its spelling, the frame turns a key as the model does, at positions up to 30000."""
    kind, settings, last, gain = ROTARY[spelling]
    model, found = analysed(kind, **settings)
    assert all(site.turns and not site.frame_note for site in found)
    assert [site.frame.gain for site in found] == [pytest.approx(gain, abs=1e-12)]
    check(model, [site.frame for site in found], last)


def test_a_part_of_the_key_from_another_source():
    """Latent attention: only the shared part turns, which the model caches apart from its latents."""
    model, (site,) = analysed("deepseek_v3", **MLA)
    frame = site.frame
    assert int(frame.first.min()) == 8 and site.key_dim == 16
    check(model, [Frame(frame.first - 8, frame.second - 8, frame.freq)], 30000, part="values")


def test_each_layer_has_its_own_base(tiny_model):
    """Two rotary bases in one model are two frames."""
    model = tiny_model("gemma3_text")
    frames = [site.frame for site in sites(model)]
    check(model, frames, 30000)
    assert not torch.allclose(frames[0].freq, frames[1].freq)


def test_only_part_of_the_channels():
    """Partial rotary: the pairs are within the rotated part, the rest is in no pair."""
    frame = analysed("phi")[1][0].frame
    assert frame.first.tolist() == [0, 1] and frame.second.tolist() == [2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_are_read_exactly(dtype):
    """Frequencies come out as the model's own buffer holds them, the slowest included, whatever the dtype."""
    model = tiny("llama", max_position_embeddings=1024, rope_parameters=LLAMA3).to(dtype)
    freq = model.model.rotary_emb.inv_freq.double()
    for site in sites(model):
        assert torch.allclose(site.frame.freq, freq, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_keys_without_rotation(tiny_model, name):
    """Where positions enter at the embedding, keys do not turn."""
    for site in sites(tiny_model(name)):
        assert not site.turns and site.frame is None and not site.frame_note


def test_layers_without_positions():
    """A model may turn keys in some layers only."""
    found = analysed("smollm3", **GQA, num_hidden_layers=2, no_rope_layers=[1, 0], pad_token_id=0)[1]
    assert [site.turns for site in found] == [True, False]
    assert found[1].frame is None


def test_positions_that_the_graph_counts_itself():
    """A decoder without position ids is read at any position all the same."""
    for site in sites(Counting(2, 16, 8)):
        assert torch.allclose(site.frame.freq, 100.0 ** -(torch.arange(4).double() / 4), rtol=1e-6)


def test_a_rotation_that_cannot_be_read_is_noted_and_no_refusal():
    """A weight per channel after the rotation is no rotation: no frame, a note in the report, and no refusal."""
    model, _ = analysed("hunyuan_v1_dense", **GQA)
    with torch.no_grad():
        model.model.layers[0].self_attn.key_layernorm.weight.copy_(torch.linspace(0.5, 2, 16))
    (site,) = sites(model)
    assert site.turns and site.frame is None
    assert site.frame_note.endswith("it changes by more than a rotation")
    report = kvpass.explain(model)
    assert report.supported and report.rows[0].note == site.frame_note
    assert kvpass.compile(model, budget=0.5, backend="eager").kvpass.plan.supported


class Counting(nn.Module):
    """One attention that turns its keys by arange and multiplies complex numbers."""

    def __init__(self, heads, hidden, dim):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, hidden), nn.Linear(heads * dim, 32, bias=False)
        self.qkv = nn.ModuleList(nn.Linear(hidden, heads * dim) for _ in range(3))
        self.heads, self.dim = heads, dim

    def forward(self, input_ids, attention_mask=None, use_cache=False):
        batch, length = input_ids.shape
        freq = 100.0 ** (-torch.arange(0, self.dim, 2).float() / self.dim)
        angle = torch.arange(length)[:, None].float() * freq
        unit = torch.polar(torch.ones_like(angle), angle)
        x = self.embed(input_ids)
        q, k, v = (p(x).view(batch, length, self.heads, self.dim).transpose(1, 2) for p in self.qkv)
        q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * unit).flatten(-2) for t in (q, k))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(out.transpose(1, 2).reshape(batch, length, -1))
