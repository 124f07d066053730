"""The output projection of each query head, found from the graph."""

import pytest
import torch
from torch import nn

from kvpass.models import plain
from kvpass.passes.capture import capture
from kvpass.passes.find import find
from kvpass.passes.inputs import inputs
from kvpass.passes.normalize import normalize
from kvpass.passes.outputs import per_head


def sites(model):
    found = inputs(find(normalize(capture(model))))
    assert not found.refusals
    return found.sites


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name, weight", [("llama", "self_attn.o_proj"), ("gpt2", "attn.c_proj")])
def test_heads_add_up_to_the_layers_output(tiny_model, name, weight, attn):
    """Each head's values times its own block sum to what the model's projection gives, [out, in] or [in, out]."""
    model = tiny_model(name, attn)
    torch.manual_seed(0)
    for site in sites(model):
        layer = model.get_submodule(site.layer).get_submodule(weight.split(".")[1])
        blocks = per_head(site.out, layer.weight, site.heads)
        assert blocks.shape == (4, 16, 64) and blocks.data_ptr() == layer.weight.data_ptr()
        values = torch.randn(3, 4, 16)
        bias = 0 if layer.bias is None else layer.bias
        assert torch.allclose(torch.einsum("nhd,hde->ne", values, blocks) + bias, layer(values.flatten(1)), atol=1e-5)


def test_plain_pytorch_too():
    """A decoder that never heard of transformers has its projections found by what they compute."""
    for make in plain.PLAIN:
        assert [site.out.weight for site in sites(make())] == [f"model.blocks.{i}.mixer.o.weight" for i in range(2)]


@pytest.mark.parametrize("between", [torch.tanh, lambda x: x.flip(-1), lambda x: x + x.mean(-1, keepdim=True)])
def test_anything_in_between_is_no_projection(between):
    """An output that is changed, or whose heads are not side by side, before it is projected has none."""
    assert [site.out for site in sites(Head(between))] == [None]


class Head(nn.Module):
    """One attention whose output is changed before it is projected."""

    def __init__(self, between):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.qkv, self.between = nn.Linear(16, 48), between

    def forward(self, input_ids, attention_mask=None, use_cache=False):
        batch, length = input_ids.shape
        q, k, v = self.qkv(self.embed(input_ids)).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(self.between(out.transpose(1, 2).reshape(batch, length, -1)))
