"""Near misses of attention are read correctly or refused; none passes wrongly."""

import pytest
import torch

import kvpass
from tests.conftest import prompt
from tests.passes.mutations import CASES

LENGTH, STEPS = 70, 6  # longer than what compile() validates on, so that its check alone does not decide
# Rounding of another order of summation in two layers, against logits of about 1.
TOLERANCE = 1e-3


@torch.no_grad()
def verdict(model) -> str:
    """ "refused", "read", or how far the compiled model is from the untouched one."""
    try:
        compiled = kvpass.compile(model, budget=1.0, backend="eager")
    except kvpass.UnsupportedModelError as refusal:
        return f"refused: {refusal}"
    ids = prompt(LENGTH + STEPS, batch=2)
    padding = torch.ones_like(ids)
    padding[1, :9] = 0
    positions = (padding.cumsum(-1) - 1).clamp(min=0)
    expected = model(ids, position_ids=positions, attention_mask=padding).logits
    output = compiled(ids[:, :LENGTH], position_ids=positions[:, :LENGTH], attention_mask=padding[:, :LENGTH])
    logits, cache = [output.logits], output.past_key_values
    for i in range(LENGTH, LENGTH + STEPS):
        at = slice(i, i + 1)
        step = compiled(
            ids[:, at], position_ids=positions[:, at], attention_mask=padding[:, : i + 1], past_key_values=cache
        )
        logits.append(step.logits)
    real = padding.bool()
    difference = float((torch.cat(logits, 1) - expected)[real].abs().max())
    return "read" if difference < TOLERANCE else f"wrong by {difference:.2e}"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_read_or_refused(name):
    """A near miss either computes what the untouched model computes, step by step, or is refused with a reason."""
    assert verdict(CASES[name]()).split(":")[0] in ("read", "refused")
