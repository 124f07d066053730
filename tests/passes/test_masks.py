"""Masks are told apart by evaluation, whatever their spelling and length."""

import pytest

from kvpass import models
from kvpass.passes.capture import capture
from kvpass.passes.classify import classify
from kvpass.passes.find import find
from kvpass.passes.normalize import normalize
from kvpass.passes.spec import Mask


def masks(model):
    plan = classify(find(normalize(capture(model))))
    assert not plan.refusals
    return [site.mask for site in plan.sites]


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [1, 7, 8, 200, 4096])
def test_window_is_exact(window, attn):
    """A sliding window is read to the token, below and above the length up to which masks are evaluated densely."""
    model = models.tiny("mistral", attn=attn, sliding_window=window, num_hidden_layers=1)
    assert masks(model) == [Mask(window)]


def test_layers_are_classified_one_by_one():
    """A model with a sliding and a full layer gets both."""
    assert masks(models.tiny("qwen2_mixed")) in ([Mask(8), Mask(0)], [Mask(0), Mask(8)])
