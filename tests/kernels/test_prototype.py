"""Prototypes: the compiled costs of cuts against the same in tensors, and what a prototype of equal entries is."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass.kernels import cpu
from kvpass.kernels.entries import Observation
from kvpass.kernels.frame import Frame
from kvpass.kernels.prototype import layer, prototypes, split_costs


def make(seed, *, rows=2, slots=40, dim=8, value=5, probes=7, multiplicity="coherence", turns=True, equal=False):
    """A layer of random entries; with ``equal`` all keys and values are one."""
    g = torch.Generator().manual_seed(seed)
    k, v = torch.randn(rows, slots, dim, generator=g), torch.randn(rows, slots, value, generator=g)
    if equal:
        k, v = k[:, :1].expand_as(k), v[:, :1].expand_as(v)
    pos = torch.arange(3, slots + 3).expand(rows, -1)
    frame = Frame(torch.arange(dim // 2), torch.arange(dim // 2) + dim // 2, torch.rand(dim // 2, generator=g).double())
    return layer(
        k,
        v,
        torch.randint(0, 3, (rows, slots), generator=g).float() * (not equal),
        pos,
        torch.rand(rows, slots, generator=g),
        3 * torch.randn(rows, probes, dim, generator=g),
        torch.randint(0, slots + 9, (rows, probes), generator=g),
        Observation(torch.zeros(1, rows, 0, dim), torch.zeros(1, 0), 0.3, frame if turns else None),
        multiplicity=multiplicity,
        unrotated=turns,
    )


@given(st.integers(0, 1000), st.sampled_from(["coherence", "votes"]), st.booleans())
@settings(max_examples=15, deadline=None)
def test_compiled_costs_equal_tensors(seed, multiplicity, turns):
    """Every cut of every interval costs the same in C++ as in tensors, to fp32 sums."""
    if not cpu.available():
        pytest.skip(cpu.why_not())
    of = make(seed, multiplicity=multiplicity, turns=turns)
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, 40, (30,), generator=g)
    stop = (start + torch.randint(1, 30, (30,), generator=g)).clamp(max=40)
    row = torch.randint(0, 2, (30,), generator=g)
    ends, begins = (torch.randint(0, 41, (30, 4), generator=g) for _ in range(2))
    fast = split_costs(of, row, start, stop, ends, begins)
    slow = split_costs(dataclasses.replace(of, native=None), row, start, stop, ends, begins)
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("multiplicity", ["coherence", "votes", "calibrated"])
def test_equal_entries_merge_without_loss(multiplicity):
    """In the cached frame, n equal entries are one entry with log-vote ln n, and cost nothing."""
    of = make(0, turns=False, equal=True, multiplicity=multiplicity, probes=8)
    of = dataclasses.replace(of, seen=torch.full_like(of.seen, 40))
    row, start, stop = torch.tensor([0, 1]), torch.tensor([0, 5]), torch.tensor([1, 12])
    made = prototypes(of, row, start, stop)
    torch.testing.assert_close(made.k, of.k[row, start])
    torch.testing.assert_close(made.v, of.v[row, start])
    if multiplicity != "calibrated":
        torch.testing.assert_close(made.log_votes, torch.tensor([1.0, 7.0]).log(), rtol=1e-4, atol=1e-5)
        assert split_costs(of, row, start, stop, stop[:, None], stop[:, None]).abs().max() < 1e-6
