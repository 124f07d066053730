"""One budget for coverage and resolution: which nodes of all trees are stored (GraceKV, arXiv 2608.07001, Eq. 46-54).

An entry is bought where it removes most distortion: by adding the root of a slot that is not covered yet, or by
splitting a stored node. The C++ version and this file give the same frontier, ties included.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from kvpass.kernels import cpu

ABSENT, STORED, SPLIT = 0, 1, 2  # states of a node


@dataclass(frozen=True)
class Offer:
    """What is for sale. Indices are nodes; all arrays are as long as there are nodes unless said otherwise."""

    roots: np.ndarray  # [J] int64, the root of each slot of each row, in the order that settles ties
    added: np.ndarray  # [J] float64 utility of storing a root
    parent: np.ndarray  # int64, -1 for a root
    first: np.ndarray  # int64, first child
    count: np.ndarray  # int64, children; 0 = cannot be split
    split: np.ndarray  # float64 utility of the split, per entry it costs


def reserve(
    offer: Offer, leaf: np.ndarray, group: np.ndarray, groups: int, cap: int, group_cap: int
) -> tuple[np.ndarray, int]:
    """Store what isolates the ``leaf`` nodes [F] in turn, as far as a cap for all and one for each group permits.

    A leaf whose path costs more than is left is passed over. Entries already bought for others cost nothing. Returns
    the state of every node and the entries spent.
    """
    state = np.zeros(len(offer.parent), np.int8)
    spent = np.zeros(groups, np.int64)
    used = 0
    parent, count, first = offer.parent, offer.count, offer.first
    for target, owner in zip(leaf.tolist(), group.tolist(), strict=True):
        path, cost, node = [], 0, target
        while True:
            if state[node] != ABSENT:
                break
            above = parent[node]
            if above < 0:
                cost += 1
                break
            cost += 0 if state[above] == SPLIT else count[above] - 1
            path.append(above)
            node = above
        if used + cost > cap or spent[owner] + cost > group_cap:
            continue
        if state[node] == ABSENT:
            state[node] = STORED
        for above in reversed(path):
            state[above] = SPLIT
            state[first[above] : first[above] + count[above]] = STORED
        used += int(cost)
        spent[owner] += cost
    return state, used


def auction(offer: Offer, state: np.ndarray, budget: int) -> tuple[np.ndarray, int, float]:
    """Buy the dearest affordable utility first until ``budget`` entries are spent or nothing is left to buy.

    Utility is not monotone along a path, so offers wait in a heap and a split offers its children. Equal utilities go
    in the order they were offered; an offer that costs more than is left is dropped.

    Returns:
        The states after, the entries left, and the least utility bought (inf when nothing was).
    """
    if cpu.available():
        return cpu.auction(offer, state, budget)
    return auction_by_heapq(offer, state, budget)


def auction_by_heapq(offer: Offer, state: np.ndarray, budget: int) -> tuple[np.ndarray, int, float]:
    """:func:`auction` without a compiler."""
    state = state.copy()
    first, count, split = offer.first.tolist(), offer.count.tolist(), offer.split.tolist()
    heap: list[tuple[float, int, int, bool]] = []

    for root, utility in zip(offer.roots.tolist(), offer.added.tolist(), strict=True):
        if state[root] == ABSENT:
            heap.append((-utility, len(heap), root, True))
            continue
        stack = [root]
        while stack:
            node = stack.pop()
            if state[node] == SPLIT:
                stack += range(first[node] + count[node] - 1, first[node] - 1, -1)
            elif count[node]:
                heap.append((-split[node], len(heap), node, False))
    heapq.heapify(heap)
    turn, least = len(heap), float("inf")
    while heap and budget:
        utility, _, node, adds = heapq.heappop(heap)
        cost = 1 if adds else count[node] - 1
        if cost > budget:
            continue
        budget -= cost
        least = min(least, -utility)
        if adds:
            state[node] = STORED
            children = [node]
        else:
            state[node] = SPLIT
            children = range(first[node], first[node] + count[node])
            state[children.start : children.stop] = STORED
        for child in children:
            if count[child]:
                heapq.heappush(heap, (-split[child], turn, child, False))
                turn += 1
    return state, budget, least
