import pytest
import torch

import kvpass
from kvpass.models.counterexamples import (
    COUNTEREXAMPLES,
    bidirectional,
    data_dependent_mask,
    mixed_heads,
    prefix_lm,
    recurrent,
    stochastic,
    unread_step,
)
from kvpass.models.plain import PLAIN, plain_alibi, plain_grouped, plain_matmul, plain_sdpa

EVERY = [*PLAIN, *COUNTEREXAMPLES]


def _name(build):
    return build.__name__


def _ids():
    return torch.randint(0, 128, (2, 17), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _reach(build, at: int) -> torch.Tensor:
    """bool [17]: the positions whose logits change when token `at` does."""
    model, ids = build(), _ids()
    changed = ids.clone()
    changed[:, at] = (changed[:, at] + 1) % 128
    return ((model(ids).logits - model(changed).logits).abs().amax(dim=(0, 2))) > 0


@pytest.mark.parametrize("build", EVERY, ids=_name)
def test_exports(build, check_export):
    """Every plain decoder exports with dynamic batch and length, and says why it exists."""
    error = check_export(build())
    assert error == 0.0 or build is stochastic
    assert build.__doc__


@pytest.mark.parametrize("build", EVERY, ids=_name)
def test_deterministic_weights(build):
    """Building twice gives the same weights and leaves the global random state alone."""
    before = torch.get_rng_state()
    first, second = build().state_dict(), build().state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("build", [build for build in PLAIN if build is not plain_grouped], ids=_name)
@torch.no_grad()
def test_spellings_of_one_decoder(build):
    """All spellings over the same weights compute the same logits."""
    torch.testing.assert_close(build()(_ids()).logits, plain_sdpa()(_ids()).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("build", [*PLAIN, plain_alibi], ids=_name)
@torch.no_grad()
def test_compiled_at_full_budget_it_writes_the_same(build):
    """Whatever the spelling: 16 greedy tokens and a left-padded batch's logits are those of the untouched decoder."""
    model = build()
    compiled = kvpass.compile(model, budget=1.0, backend="eager")
    assert [layer.kv_heads for layer in compiled.kvpass.runtime.layers] == [2, 2]
    ids, cache, new = _ids(), compiled.kvpass.new_cache(), _ids()
    for _ in range(16):
        expected = model(ids).logits[:, -1]
        got = compiled(new, past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)  # fp32 sums in another order
        new = got.argmax(-1, keepdim=True)
        assert torch.equal(new, expected.argmax(-1, keepdim=True))
        ids = torch.cat((ids, new), 1)
    padding = torch.ones_like(ids)
    padding[1, :3] = 0
    positions = (padding.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": padding}
    got, expected = (decoder(**inputs).logits[padding.bool()] for decoder in (compiled, model))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("build", PLAIN, ids=_name)
@torch.no_grad()
def test_accepted_decoders_are_causal_and_positional(build):
    """A token changes its own and every later logit, never an earlier one; positions and padding matter."""
    assert _reach(build, 8).tolist() == [False] * 8 + [True] * 9
    model, ids = build(), _ids()
    whole = model(ids).logits
    stretched = model(ids, position_ids=2 * torch.arange(17).expand(2, -1)).logits
    assert not torch.allclose(whole, stretched)


@pytest.mark.parametrize("build", PLAIN, ids=_name)
@torch.no_grad()
def test_padding_and_whole_masks(build):
    """Left padding changes nothing a real token sees; a 4-D bool mask replaces the decoder's own."""
    model, ids = build(), _ids()
    whole = model(ids).logits
    padded = torch.cat((ids[:, :3], ids), dim=1)
    keep = torch.cat((torch.zeros(2, 3, dtype=torch.long), torch.ones_like(ids)), dim=1)
    positions = (keep.cumsum(1) - 1).clamp(min=0)
    real = model(padded, position_ids=positions, attention_mask=keep).logits[:, 3:]
    torch.testing.assert_close(real, whole, atol=1e-4, rtol=1e-4)
    causal = torch.ones(17, 17, dtype=torch.bool).tril()[None, None]
    torch.testing.assert_close(model(ids, attention_mask=causal).logits, whole, atol=1e-4, rtol=1e-4)


def test_refuses_a_cache():
    """A plain decoder given past_key_values says that it has no cache."""
    with pytest.raises(TypeError, match="no cache"):
        plain_sdpa()(_ids(), past_key_values=object())


def test_non_causal_counterexamples_reach_backwards():
    """bidirectional reaches every earlier position; prefix_lm only within its first four tokens."""
    assert _reach(bidirectional, 8).all()
    assert _reach(prefix_lm, 3).all()
    assert _reach(prefix_lm, 4).tolist() == [False] * 4 + [True] * 13


@pytest.mark.parametrize("build", [unread_step, mixed_heads, data_dependent_mask, recurrent], ids=_name)
@torch.no_grad()
def test_causal_counterexamples_still_differ(build):
    """These are causal, yet their logits are not those of the accepted decoder."""
    assert not _reach(build, 8)[:8].any()
    assert (build()(_ids()).logits - plain_matmul()(_ids()).logits).abs().max() > 0.1


@torch.no_grad()
def test_stochastic_disagrees_with_itself():
    """Two runs of the stochastic decoder in eval mode give different logits."""
    model = stochastic()
    assert not model.training
    assert not torch.equal(model(_ids()).logits, model(_ids()).logits)
