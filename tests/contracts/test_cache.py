"""What a cache object promises: forks, crops, turns, isolation, failures."""

import threading

import pytest
import torch

from tests.conftest import greedy, prompt


def run(model, cache, ids):
    with torch.no_grad():
        return model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]


def filled(model, length=40, batch=1):
    cache = model.kvpass.new_cache()
    run(model, cache, prompt(length, batch))
    return cache


def snapshot(cache):
    return [tensor.clone() for tensor in cache.tensors()], cache.columns


def unchanged(cache, before):
    tensors, columns = before
    labelled = zip(cache.tensors(), tensors, strict=True)
    return columns == cache.columns and all(a.shape == b.shape and torch.equal(a, b) for a, b in labelled)


def test_forks_share_the_store_and_never_see_each_other(compiled):
    """One compressed document, many questions: forks share the store's memory and answer like fresh caches."""
    model = compiled("llama")
    document, questions = prompt(40), [prompt(1, seed=s) for s in (1, 2, 3)]
    base = filled(model)
    forks = [base.fork() for _ in questions]
    assert all(f.stores[0].k.data_ptr() == base.stores[0].k.data_ptr() for f in forks)
    before = snapshot(base)
    answers = [run(model, fork, question) for fork, question in zip(forks, questions, strict=True)]
    assert unchanged(base, before)
    for question, answer in zip(questions, answers, strict=True):
        fresh = model.kvpass.new_cache()
        run(model, fresh, document)
        assert torch.equal(run(model, fresh, question), answer)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2_mixed"])
def test_crop_removes_the_last_tokens_exactly(compiled, name):
    """After appending and cropping, the next step is what it would have been."""
    model = compiled(name)
    cache, other = filled(model), filled(model)
    cache.activate_past_recording()
    run(model, cache, prompt(5, seed=9))
    cache.crop(-5)
    assert cache.get_seq_length() == other.get_seq_length() == 40
    torch.testing.assert_close(run(model, cache, prompt(1)), run(model, other, prompt(1)), rtol=0, atol=1e-5)


def test_crop_into_the_store_is_refused(compiled):
    """What is compressed cannot be cropped; the reason is given and nothing changes."""
    cache = filled(compiled("llama"))
    before = snapshot(cache)
    with pytest.raises(ValueError, match="cannot crop 3 tokens: only the last 0 are not compressed"):
        cache.crop(-3)
    with pytest.raises(ValueError, match="crop takes a negative number of tokens"):
        cache.crop(3)
    assert unchanged(cache, before)


def test_several_tokens_after_compression_are_causal(compiled):
    """A piece of several tokens sees the whole store and is causal in itself: the same as one by one."""
    model, piece = compiled("llama"), prompt(6, seed=5)
    together, singly = filled(model), filled(model)
    together.activate_past_recording()
    last = run(model, together, piece)
    for token in piece.split(1, dim=1):
        step = run(model, singly, token)
    torch.testing.assert_close(last, step, rtol=0, atol=1e-5)


def test_a_second_turn_is_compressed_to_the_budget_of_the_whole(compiled):
    """A cache passed back in goes on; the new prompt is compressed with the old entries to budget x everything seen."""
    model = compiled("llama", budget=0.5, policy="snapkv")
    cache = filled(model, 40)
    for _ in range(4):
        run(model, cache, prompt(1))
    run(model, cache, prompt(20, seed=3))
    assert cache.get_seq_length() == 64
    # 32 a row is half of 64; a row holds 20 + 4 + 20 = 44 before.
    assert cache.entries() == 4 * 32
    assert all(int(store.pos.max()) == 63 for store in cache.stores)


def test_positions_go_on_after_compression(compiled):
    """The n-th generated token stands at position prompt + n, also in the second call."""
    model = compiled("llama", budget=0.2)
    for _ in range(2):
        cache = filled(model, 30)
        for n in range(3):
            run(model, cache, prompt(1))
            assert int(cache.tails[0].pos.max()) == 30 + n


def test_reordering_is_right_for_every_tensor(compiled):
    """After reorder_cache each sequence is, in every tensor, the one it was taken from."""
    model = compiled("llama")
    cache = filled(model, 20, batch=3)
    run(model, cache, prompt(1, 3))
    twin = cache.fork()
    twin.reorder_cache(torch.tensor([2, 0, 0]))
    logits, taken = (
        run(model, cache.fork(), prompt(1, 3, seed=4)),
        run(model, twin, prompt(1, 3, seed=4)[[2, 0, 0]]),
    )
    torch.testing.assert_close(taken, logits[[2, 0, 0]], rtol=0, atol=1e-6)
    wide = cache.fork()
    wide.batch_repeat_interleave(2)
    assert wide.batch_size == 6 and wide.entries() == 2 * cache.entries()


@pytest.mark.parametrize("where", ["forward", "compress"])
def test_a_failure_leaves_nothing_behind(compiled, monkeypatch, where):
    """An exception or Ctrl-C inside forward or compress leaves the cache as it was, and the next call is right."""
    model = compiled("qwen2_mixed")
    runtime = model.kvpass.runtime
    cache, other = filled(model), filled(model)
    before = snapshot(cache)
    target = runtime.prefill.module.compress if where == "compress" else runtime.prefill.module

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(model, cache, prompt(7, seed=2))
    assert cache.columns == before[1]
    torch.testing.assert_close(run(model, cache, prompt(7, seed=2)), run(model, other, prompt(7, seed=2)))


def test_two_models_and_two_threads_do_not_meet(compiled):
    """Two budgets over one set of weights, from two threads at once, each say what they say alone."""
    models = [compiled("llama", budget=budget) for budget in (0.2, 0.8)]
    ids = prompt(40)
    alone = [greedy(model, ids, 12) for model in models]
    results = {}

    def work(index):
        results[index] = [greedy(models[index], ids, 12) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in (0, 1):
        assert all(torch.equal(out, alone[index]) for out in results[index])


def test_growth_does_not_copy_the_cache_every_token(compiled):
    """The store never moves while decoding, and the tail is enlarged a logarithmic number of times."""
    model = compiled("llama")
    cache = filled(model)
    store = [s.k.data_ptr() for s in cache.stores]
    moves, last = 0, None
    for _ in range(200):
        run(model, cache, prompt(1))
        moves, last = moves + (cache.keys[0].data_ptr() != last), cache.keys[0].data_ptr()
    assert [s.k.data_ptr() for s in cache.stores] == store
    assert moves <= 3  # 64, 128, 256 slots


def test_a_step_allocates_the_same_whatever_the_context(compiled):
    """Bytes allocated by a decode step do not depend on how much the cache holds."""
    model, allocated = compiled("llama", budget=1.0), []
    for length in (40, 400):
        cache = filled(model, length)
        run(model, cache, prompt(1))
        with torch.profiler.profile(profile_memory=True) as profile:
            run(model, cache, prompt(1))
        allocated.append(sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages()))
    assert allocated[0] == allocated[1] > 0


def test_introspection_goes_to_the_original(tiny_model, compiled):
    """labels, output_attentions, output_hidden_states, use_cache=False and gradients use the original forward."""
    model, ours, ids = tiny_model("llama"), compiled("llama"), prompt(12)
    with torch.no_grad():
        assert torch.equal(ours(ids, labels=ids).loss, model(ids, labels=ids).loss)
        assert len(ours(ids, output_hidden_states=True).hidden_states) == 3
        assert torch.equal(ours(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    loss = ours(ids, labels=ids).loss
    loss.backward()
    assert next(model.parameters()).grad is not None
    model.zero_grad(set_to_none=True)


@pytest.mark.parametrize(
    "call, message",
    [
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, "the prompt is empty; give at least one token"),
        (
            {"input_ids": torch.ones(1, 600, dtype=torch.int64)},
            "the prompt has 600 tokens, and the model has only 512",
        ),
        ({"inputs_embeds": torch.zeros(1, 4, 64)}, "inputs_embeds is not supported by a compiled model"),
        (
            {"input_ids": torch.ones(1, 4, dtype=torch.int64), "attention_mask": torch.ones(1, 1, 4, 4)},
            r"attention_mask must be \[batch, length\]",
        ),
    ],
)
def test_bad_input_is_one_sentence(compiled, call, message):
    """Bad input is refused in one sentence, before anything changes."""
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        compiled("llama")(**call)


@pytest.mark.parametrize("policy", ["streaming", "snapkv", "keepkv"])
@pytest.mark.parametrize("name", ["llama", "qwen2_mixed"])
def test_any_chunking_keeps_the_same_set(compiled, name, policy):
    """A prompt given in chunks, also shorter than the window or of one token, keeps what it keeps in one piece."""
    model, ids = compiled(name, budget=0.3, policy=policy), prompt(61)
    whole = filled_with(model, ids, None)
    for chunk in (7, 20, 30, 60):
        pieces = filled_with(model, ids, chunk)
        for a, b in zip(whole.stores, pieces.stores, strict=True):
            assert torch.equal(a.pos, b.pos) and torch.equal(a.tokens, b.tokens)
            torch.testing.assert_close(a.v, b.v, rtol=0, atol=1e-3)  # a least-squares fit on inputs that round apart


def filled_with(model, ids, chunk):
    cache = model.kvpass.new_cache()
    name = "cache" if "cache" in model.forward.__signature__.parameters else "past_key_values"
    greedy(model, ids, 2, prefill_chunk_size=chunk, **{name: cache})
    return cache
