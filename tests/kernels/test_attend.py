"""The operator and its implementations against the reference."""

import pytest
import torch

from kvpass.kernels import cpu, packed_sdpa, reference
from kvpass.kernels.attend import attend

BATCH, KV_HEADS, DIM = 3, 2, 16


def state(
    group=2,
    length=1,
    slots=9,
    filled=5,
    stored=(4, 0, 7),
    window=0,
    dtype=torch.float32,
    value_dim=DIM,
    chunk=0,
    writes=True,
    seed=0,
):
    """Operator arguments: rows of unequal length, some of them empty, a half-filled tail, one padded sequence."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    row_len = torch.tensor([[n, max(0, n - 2)] for n in stored], dtype=torch.int32)
    row_start = (row_len.flatten().cumsum(0) - row_len.flatten()).view(BATCH, KV_HEADS).long()
    total = int(row_len.sum())
    tail_pos = torch.full((BATCH, slots), -1, dtype=torch.int32)
    for i in range(filled):
        tail_pos[:, i % slots] = 20 + i
    q_pos = (20 + filled + torch.arange(length)).expand(BATCH, -1).to(torch.int32).clone()
    if length > 1:
        q_pos[1, : length // 2] = -1
    return [
        draw(BATCH, KV_HEADS * group, length, DIM), draw(BATCH, KV_HEADS, length, DIM),
        draw(BATCH, KV_HEADS, length, value_dim), q_pos,
        draw(total, DIM), draw(total, value_dim), torch.rand(total, generator=g) * 3, row_start, row_len,
        draw(BATCH, KV_HEADS, slots, DIM), draw(BATCH, KV_HEADS, slots, value_dim), tail_pos,
        torch.tensor([filled % slots]), 0.3, window, 0.0, None, chunk, writes,
    ]  # fmt: skip


def clone(arguments):
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]


CASES = {
    "one token": {},
    "several tokens": {"length": 4},
    "a long piece": {"length": 30, "slots": 40},
    "an empty cache": {"length": 12, "slots": 12, "filled": 0, "stored": (0, 0, 0)},
    "a window": {"window": 3, "stored": (0, 0, 0)},
    "a full ring": {"window": 5, "slots": 5, "filled": 8, "stored": (0, 0, 0)},
    "more new tokens than ring slots": {
        "window": 5,
        "slots": 5,
        "filled": 8,
        "length": 7,
        "stored": (0, 0, 0),
    },
    "multi-query attention": {"group": 8},
    "chunks, of which the tail is one": {"window": 5, "chunk": 5, "slots": 5, "filled": 5, "stored": (0, 0, 0)},
    "chunks, entered by several tokens": {"window": 4, "chunk": 4, "length": 11, "slots": 4, "stored": (0, 0, 0)},
    "a cache that another attention writes": {"length": 4, "writes": False},
    "values of another size": {"value_dim": 24},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", ["packed SDPA", "operator"])
def test_implementations_match_the_reference(case, implementation):
    """Every implementation gives the reference's output and writes the same tail."""
    run = packed_sdpa.attend if implementation == "packed SDPA" else attend
    arguments = state(**CASES[case])
    ours, theirs = clone(arguments), clone(arguments)
    expected, actual = reference.attend(*theirs), run(*ours)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)  # one fp32 softmax in another order
    assert torch.equal(ours[9], theirs[9]) and torch.equal(ours[10], theirs[10])
    assert actual.transpose(1, 2).is_contiguous()


def test_a_chunk_begins_at_a_multiple_of_its_size():
    """The first token of a chunk sees itself alone, its last one the whole chunk; a tail that is not ours stays."""
    arguments = state(window=4, chunk=4, length=8, slots=4, filled=4, stored=(0, 0, 0), writes=False)
    before = arguments[9].clone()
    weights_of = [attend(*clone(arguments))[0, 0, step] for step in (0, 3)]  # positions 24 and 27
    torch.testing.assert_close(weights_of[0], arguments[2][0, 0, 0])
    alone = [value[:, :, :4] if index < 3 else value for index, value in enumerate(arguments)]
    alone[3], alone[14], alone[17] = arguments[3][:, :4], 0, 0
    alone[11] = torch.full_like(arguments[11], -1)
    torch.testing.assert_close(weights_of[1], reference.attend(*clone(alone))[0, 0, 3], rtol=0, atol=2e-6)
    attend(*arguments)
    assert torch.equal(arguments[9], before)


@pytest.mark.parametrize("softcap, sinks", [(5.0, False), (0.0, True), (5.0, True)])
@pytest.mark.parametrize("length", [1, 3, 20])
def test_softcap_and_sinks(softcap, sinks, length):
    """A soft cap bounds the logit before the vote; a sink only enters the denominator."""
    arguments = state(length=length, slots=30)
    arguments[15] = softcap
    arguments[16] = torch.randn(KV_HEADS * 2) if sinks else None
    expected = reference.attend(*clone(arguments))
    torch.testing.assert_close(attend(*clone(arguments)), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(packed_sdpa.attend(*clone(arguments)), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float64, 1e-12)])
@pytest.mark.parametrize("length", [1, 20])
def test_other_dtypes(dtype, tolerance, length):
    """Half precision stays within its rounding, fp64 within fp64's."""
    arguments = state(length=length, slots=30, dtype=dtype)
    expected = reference.attend(*clone(arguments))
    torch.testing.assert_close(attend(*clone(arguments)), expected, rtol=0, atol=tolerance)


def test_integer_votes_equal_repeated_entries():
    """An entry with vote p attends like p copies of itself."""
    arguments = state(stored=(4, 4, 4))
    votes = torch.tensor([1, 2, 3, 5])[torch.arange(len(arguments[6])) % 4]
    voted = clone(arguments)
    voted[6] = votes.float().log()
    repeated = clone(arguments)
    repeated[4], repeated[5] = (
        arguments[4].repeat_interleave(votes, 0),
        arguments[5].repeat_interleave(votes, 0),
    )
    repeated[6] = torch.zeros(int(votes.sum()))
    lengths = torch.stack([
        votes[int(s) : int(s) + int(n)].sum()
        for s, n in zip(arguments[7].flatten(), arguments[8].flatten(), strict=True)
    ]).view(BATCH, KV_HEADS)  # fmt: skip
    repeated[8] = lengths.to(torch.int32)
    repeated[7] = (lengths.flatten().cumsum(0) - lengths.flatten()).view(BATCH, KV_HEADS)
    torch.testing.assert_close(attend(*voted), attend(*repeated), rtol=0, atol=1e-6)


def test_unused_slots_are_never_read():
    """NaN in unused tail slots changes nothing."""
    arguments = state(length=3, slots=12)
    poisoned = clone(arguments)
    poisoned[9][:, :, 8:] = torch.nan
    poisoned[10][:, :, 8:] = torch.nan
    for run in (attend, packed_sdpa.attend):
        assert torch.equal(run(*clone(poisoned)), run(*clone(arguments)))


@pytest.mark.parametrize("length", [1, 20])
def test_opcheck(length):
    """The operator keeps torch.library's contract: schema, fake, mutation."""
    torch.library.opcheck(
        attend, tuple(state(length=length, slots=30)),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )  # fmt: skip


def test_the_compiled_kernel_serves():
    """On a machine with a compiler the C++ kernel is used, and the reason is known where it is not."""
    assert cpu.available() == (cpu.why_not() is None)
