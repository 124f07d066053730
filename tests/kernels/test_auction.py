"""The auction's heap, compiled and not; slots against the recurrence."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass.kernels import cpu
from kvpass.kernels.auction import Offer, auction_by_heapq
from kvpass.kernels.slots import curvature, robust, segment, unit
from kvpass.kernels.tree import Forest
from tests.policies import grace_oracle


@given(st.integers(0, 10_000), st.integers(0, 60))
@settings(max_examples=40, deadline=None)
def test_compiled_heap_equals_heapq(seed, budget):
    """Same frontier, rest and least utility, with ties and with slots that are covered already."""
    if not cpu.available():
        pytest.skip(cpu.why_not())
    rng = np.random.default_rng(seed)
    forest = Forest()
    roots = forest.grow(np.zeros(5, int), np.arange(5) * 8, np.arange(5) * 8 + 8, np.full(5, -1))
    for _ in range(3):
        node = np.flatnonzero((forest.count == 0) & (forest.length > 2) & (rng.random(len(forest)) < 0.8))
        if len(node):
            lone = forest.start[node] + rng.integers(0, forest.length[node])
            forest.split(node, np.stack([lone, lone + 1], 1))
    state = np.zeros(len(forest), np.int8)
    state[roots[:2]] = 1
    utility = rng.integers(0, 4, len(forest)).astype(float)
    offer = Offer(roots, rng.integers(0, 4, 5).astype(float), forest.parent, forest.first, forest.count, utility)
    fast, slow = cpu.auction(offer, state, budget), auction_by_heapq(offer, state, budget)
    assert np.array_equal(fast[0], slow[0]) and fast[1:] == slow[1:]


@pytest.mark.parametrize("length", [1, 15, 31, 32, 33, 130, 300])
def test_slots_equal_the_recurrence(length):
    """The dynamic program finds the edges that plain loops find, each slot 16 to 128 tokens."""
    g = torch.Generator().manual_seed(length)
    states = unit(torch.randn(2, length, 8, generator=g).cumsum(1))
    boundary = robust(curvature(states))
    edges = segment(states, boundary).tolist()
    assert edges == grace_oracle.slots(states.numpy(), boundary.numpy())
    if length >= 16:
        assert all(16 <= b - a <= 128 for a, b in pairwise(edges))


def test_still_states_do_not_turn():
    """Equal states have curvature 0, not the right angle that the formula would make of no direction."""
    states = unit(torch.ones(2, 60, 4))
    assert not curvature(states).any() and robust(curvature(states)).isfinite().all()
