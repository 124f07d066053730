"""Head counts, head sizes, groups, windows and prompt lengths drawn at random."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvpass
from kvpass.models.plain import Shape, attend_matmul, attend_sdpa, causal_mask, decoder
from tests.conftest import prompt

STEPS = 4


def sliding(window):
    """The mask rule of a decoder that reads its last ``window`` tokens."""

    def mask(causal, hidden):
        at = torch.arange(causal.shape[-1])
        return causal & (at[:, None] - at[None] < window)

    return mask


shapes = st.builds(
    Shape,
    vocab=st.just(128),
    hidden=st.sampled_from([32, 48]),
    layers=st.just(1),
    heads=st.just(0),
    kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([4, 8, 10, 16, 24]),
)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    shape=shapes,
    group=st.integers(1, 5),
    window=st.one_of(st.none(), st.integers(1, 20)),
    attend=st.sampled_from([attend_sdpa, attend_matmul]),
    length=st.integers(1, 60),
    budget=st.sampled_from([0.1, 0.3, 0.7]),
)
@torch.no_grad()
def test_any_shape_is_exact_at_budget_one_and_within_budget_below(shape, group, window, attend, length, budget):
    """Whatever the heads, the window and the prompt: budget 1 gives the untouched logits at every step, a smaller one
    exactly its entries and finite logits."""
    shape = Shape(**{**vars(shape), "heads": shape.kv_heads * group})
    model = decoder(attend, sliding(window) if window else causal_mask, shape)
    exact = kvpass.compile(model, budget=1.0, backend="eager")
    ids = prompt(length + STEPS, batch=2)
    expected = model(ids).logits
    output = exact(ids[:, :length])
    assert torch.allclose(output.logits, expected[:, :length], atol=1e-4)
    for i in range(length, length + STEPS):
        output = exact(ids[:, i : i + 1], past_key_values=output.past_key_values)
        # Rounding of another order of summation, against logits of about 1.
        assert torch.allclose(output.logits[:, 0], expected[:, i], atol=1e-4)
    small = kvpass.compile(model, budget=budget, backend="eager")
    output = small(ids[:, :length])
    rows = 2 * shape.kv_heads
    if window:
        assert output.past_key_values.entries() == rows * min(length, window)
    else:
        kept = int(budget * 10) * length * shape.kv_heads // 10
        assert output.past_key_values.entries() == 2 * max(kept, shape.kv_heads)
    output = small(ids[:, length : length + 1], past_key_values=output.past_key_values)
    assert bool(output.logits.isfinite().all())
