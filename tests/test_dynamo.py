"""``torch.compile(model, backend="kvpass")``: the same passes behind Dynamo's trace."""

import pytest
import torch

from kvpass import dynamo, models
from tests.conftest import prompt


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, budget=1.0, **options):
    return torch.compile(
        model, backend="kvpass", dynamic=True, options={"budget": budget, "lower_with": "eager", **options}
    )


def call(model, ids, mask, **kwargs):
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False, **kwargs
        ).logits  # fmt: skip


@pytest.mark.slow
def test_growing_sequences_run_on_the_cache():
    """Calls on a growing, left-padded batch give the untouched model's logits, each computing only the new tokens."""
    model = models.tiny("llama")
    fast, ids = compiled(model), prompt(20, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    for _ in range(4):
        expected = call(model, ids, mask)
        assert torch.allclose(call(fast, ids, mask)[mask.bool()], expected[mask.bool()], atol=1e-4)
        ids = torch.cat([ids, expected[:, -1:].argmax(-1)], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    other = prompt(30, batch=2, seed=1)
    mask = torch.ones_like(other)
    assert torch.allclose(call(fast, other, mask), call(model, other, mask), atol=1e-4)


@pytest.mark.slow
def test_one_sequence_and_the_last_logits_only():
    """A batch of one is traced inside any_batch, and logits_to_keep is a tensor of columns."""
    model = models.tiny("llama")
    fast, ids = compiled(model, budget=0.5), prompt(20)
    for _ in range(3):
        mask, last = torch.ones_like(ids), torch.tensor([ids.shape[1] - 1])
        with dynamo.any_batch(ids, mask):
            logits = call(fast, ids, mask, logits_to_keep=last)
        if ids.shape[1] == 20:  # the first new token is the full cache's at every budget
            assert torch.allclose(logits, call(model, ids, mask, logits_to_keep=last), atol=1e-4)
        assert logits.shape[1] == 1
        ids = torch.cat([ids, logits.argmax(-1)], 1)


class Broken(torch.nn.Module):
    """A decoder that Dynamo traces in two pieces."""

    def __init__(self):
        super().__init__()
        self.inner = models.tiny("llama")

    def forward(self, input_ids, position_ids, attention_mask, use_cache=False):
        hidden = self.inner.model(input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False)
        torch._dynamo.graph_break()
        return self.inner.lm_head(hidden.last_hidden_state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attention_mask": None}, "the traced call does not take attention_mask; pass attention_mask"),
        ({"use_cache": True}, "tensors, not only logits; call with use_cache=False"),
        ({"logits_to_keep": 3}, "keeps the logits of a number of tokens.*pass logits_to_keep as a tensor of columns"),
    ],
)
def test_a_call_that_cannot_continue_is_refused(change, reason):
    """What the traced call lacks is named, with what to pass instead."""
    ids = prompt(20, batch=2)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    given |= {"position_ids": torch.arange(20).expand(2, -1), **change}
    with torch.no_grad(), pytest.raises(Exception, match=reason):
        compiled(models.tiny("llama"))(**given)


def test_a_graph_break_is_refused_with_its_reason():
    """Half a model is no decoder; the reason of the break is in the message."""
    ids = prompt(20, batch=2)
    with torch.no_grad(), pytest.raises(Exception, match="only a part of the model, cut at a graph break: Call to"):
        compiled(Broken())(ids, torch.arange(20).expand(2, -1), torch.ones_like(ids))


def test_fixed_sizes_gradients_and_unknown_options_are_refused():
    """Each in one sentence."""
    model, ids = models.tiny("llama"), prompt(20, batch=2)
    positions = torch.arange(20).expand(2, -1)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions, "use_cache": False}
    with torch.no_grad(), pytest.raises(Exception, match="the trace fixed the length to 20; pass dynamic=True"):
        torch.compile(model, backend="kvpass", dynamic=False)(**given)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="unknown option 'budgte'"):
        torch.compile(model, backend="kvpass", dynamic=True, options={"budgte": 1})(**given)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="computes no gradients"):
        compiled(model)(**given)
