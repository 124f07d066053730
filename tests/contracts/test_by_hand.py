"""Decoding on a compressed cache against attention over plain Python lists."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.conftest import greedy, prompt


def lists(cache):
    """[layer][KV head] -> list of (key, value, log-vote), copied out of the store."""
    found = []
    for store in cache.stores:
        rows = []
        for start, length in zip(store.row_start[0].tolist(), store.row_len[0].tolist(), strict=True):
            rows.append([(store.k[i], store.v[i], float(store.log_votes[i])) for i in range(start, start + length)])
        found.append(rows)
    return found


@torch.no_grad()
def step(model, entries, token, position):
    """Logits after one token: the decoder written out, one loop over layers and one over query heads."""
    hidden = model.model.embed_tokens(torch.tensor([[token]]))
    cos, sin = model.model.rotary_emb(hidden, torch.tensor([[position]]))
    for layer, rows in zip(model.model.layers, entries, strict=True):
        x, attention = layer.input_layernorm(hidden), layer.self_attn
        q, k, v = (
            project(x).view(1, 1, -1, attention.head_dim).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        for head, row in enumerate(rows):
            row.append((k[0, head, 0], v[0, head, 0], 0.0))
        outs = []
        for head in range(q.shape[1]):
            row = rows[head // attention.num_key_value_groups]
            logits = torch.stack([attention.scaling * (q[0, head, 0] @ key) + vote for key, _, vote in row])
            outs.append(sum(w * value for w, (_, value, _) in zip(logits.softmax(0), row, strict=True)))
        hidden = hidden + attention.o_proj(torch.cat(outs)[None, None])
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden))[0, -1]


@pytest.mark.parametrize("policy", ["snapkv", "keepkv"])
def test_fifty_steps_by_hand(tiny_model, compiled, policy):
    """50 greedy steps on a compressed cache equal attention over plain lists of the same entries: votes enter the
    softmax, and positions go on from the tokens seen, not from the entries kept."""
    model, ours, ids = tiny_model("llama"), compiled("llama", budget=0.3, policy=policy), prompt(60)
    cache = ours.kvpass.new_cache()
    with torch.no_grad():
        token = int(ours(ids, past_key_values=cache).logits[0, -1].argmax())
        entries, tokens = lists(cache), [token]
        for n in range(50):
            expected = step(model, entries, token, 60 + n)
            actual = ours(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
            token = int(expected.argmax())
            tokens.append(token)
    assert greedy(ours, ids, 51)[0, 60:].tolist() == tokens
    if policy == "keepkv":
        assert max(float(store.log_votes.max()) for store in cache.stores) > 0.1  # there were votes to get wrong


def test_beams_by_hand(tiny_model, compiled):
    """Beam search with 4 beams equals hypotheses that each keep a whole copy of the entries in plain lists."""
    model, ours, ids, beams, steps = tiny_model("llama"), compiled("llama", budget=0.3), prompt(60), 4, 8
    cache = ours.kvpass.new_cache()
    with torch.no_grad():
        best = ours(ids, past_key_values=cache).logits[0, -1].log_softmax(-1).topk(beams)
        held = [(float(score), [int(token)], lists(cache)) for score, token in zip(*best, strict=True)]
        for n in range(steps - 1):
            grown = []
            for score, tokens, entries in held:
                scores = step(model, entries, tokens[-1], 60 + n).log_softmax(-1).topk(beams)
                grown += [(score + float(s), [*tokens, int(t)], entries) for s, t in zip(*scores, strict=True)]
            grown.sort(key=lambda item: -item[0])
            held = [(score, tokens, [[list(row) for row in rows] for rows in e]) for score, tokens, e in grown[:beams]]
    assert greedy(ours, ids, steps, num_beams=beams)[0, 60:].tolist() == held[0][1]


def test_prompt_lookup_by_hand(tiny_model, compiled):
    """Prompt-lookup decoding, which appends drafts and crops them, says what the plain lists say."""
    model, ours, ids = tiny_model("llama"), compiled("llama", budget=0.3), prompt(6).repeat(1, 10)
    cache = ours.kvpass.new_cache()
    with torch.no_grad():
        tokens = [int(ours(ids, past_key_values=cache).logits[0, -1].argmax())]
        entries = lists(cache)
        for n in range(15):
            tokens.append(int(step(model, entries, tokens[-1], 60 + n).argmax()))
    assert greedy(ours, ids, 16, prompt_lookup_num_tokens=3)[0, 60:].tolist() == tokens


def test_sampling_by_hand(tiny_model, compiled):
    """Sampling with a seed draws what the written-out decoder draws."""
    model, ours, ids = tiny_model("llama"), compiled("llama", budget=0.3), prompt(60)
    cache = ours.kvpass.new_cache()
    with torch.no_grad():
        logits = ours(ids, past_key_values=cache).logits[0, -1]
        entries, tokens = lists(cache), []
        torch.manual_seed(3)
        for n in range(12):
            tokens.append(int(torch.multinomial(logits.softmax(-1), 1)))
            logits = step(model, entries, tokens[-1], 60 + n)
    torch.manual_seed(3)
    out = ours.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=12, pad_token_id=0
    )
    assert out[0, 60:].tolist() == tokens
