"""Sites: heads, scale and operands, in every supported spelling."""

import pytest

from kvpass.models import plain
from kvpass.passes.capture import capture
from kvpass.passes.find import find
from kvpass.passes.normalize import normalize


def sites(model):
    plan = find(normalize(capture(model)))
    assert not plan.refusals
    return plan.sites


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "name, heads", [("llama", (4, 2)), ("llama_mqa", (4, 1)), ("llama_mha", (4, 4)), ("gpt2", (4, 4))]
)
def test_keys_are_cached_before_they_are_repeated(tiny_model, name, heads, attn):
    """The cached key and value have the model's KV heads, not its query heads."""
    for site in sites(tiny_model(name, attn)):
        assert (site.heads, site.kv_heads) == heads
        assert int(site.k.meta["val"].shape[1]) == int(site.v.meta["val"].shape[1]) == heads[1]
        assert site.logits.scale == pytest.approx(0.25)


@pytest.mark.parametrize("make", plain.PLAIN)
def test_plain_pytorch_is_found(make):
    """Attention is found in a decoder that never heard of transformers."""
    assert [(site.heads, site.kv_heads) for site in sites(make())] == [(4, 2), (4, 2)]
