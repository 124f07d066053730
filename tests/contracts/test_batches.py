"""A batch gives what its rows give alone."""

import pytest
import torch

from tests.conftest import greedy, prompt

LENGTHS = (40, 23, 9)


@pytest.mark.parametrize("policy", ["streaming", "snapkv", "keepkv"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2_mixed"])
def test_left_padded_batch_equals_single_rows(compiled, name, policy):
    """Padding is never stored or scored: each row keeps the same positions, and says the same, as alone."""
    model = compiled(name, budget=0.4, policy=policy)
    rows = [prompt(length, seed=length) for length in LENGTHS]
    ids = torch.zeros(3, max(LENGTHS), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for b, row in enumerate(rows):
        ids[b, -row.shape[1] :], mask[b, -row.shape[1] :] = row, 1
    cache = model.kvpass.new_cache()
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        together = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
        for b, row in enumerate(rows):
            alone = model.kvpass.new_cache()
            logits = model(row, past_key_values=alone).logits
            torch.testing.assert_close(together[b, -row.shape[1] :], logits[0], rtol=0, atol=1e-4)
            for batched, single in zip(cache.stores, alone.stores, strict=True):
                for h in range(single.row_len.shape[1]):
                    assert kept(batched, b, h) == kept(single, 0, h)
    batched = greedy(model, ids, 16, mask)[:, -16:]
    for b, row in enumerate(rows):
        assert torch.equal(batched[b], greedy(model, row, 16)[0, -16:])


def kept(store, b, h):
    start = int(store.row_start[b, h])
    return store.pos[start : start + int(store.row_len[b, h])].tolist()


def test_a_row_of_padding_is_refused(compiled):
    """A sequence that is only padding is refused in one sentence."""
    model, mask = compiled("llama"), torch.ones(2, 5, dtype=torch.int64)
    mask[1] = 0
    with torch.no_grad(), pytest.raises(ValueError, match="a sequence of the batch is only padding"):
        model(prompt(5, 2), attention_mask=mask)
