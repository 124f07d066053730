"""Trees of prototypes: intervals that split into smaller ones down to single entries (GraceKV, arXiv 2608.07001,
Eq. 32-35).

Only nodes that an auction can reach are ever split, so a tree costs what the budget buys of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvpass.kernels.prototype import Layer, split_costs

TURNING = 0.05  # lam_kappa: what a split at the sharpest turn of an interval is worth besides its gain


@dataclass
class Forest:
    """Nodes of all rows, as arrays that grow. Children of a node are ``count`` nodes from ``first``, in order."""

    row: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    start: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    stop: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    parent: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # -1 for a root
    first: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    count: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # 0 = not split
    distortion: np.ndarray = field(default_factory=lambda: np.zeros(0))  # nan = not judged yet

    def __len__(self) -> int:
        return len(self.row)

    @property
    def length(self) -> np.ndarray:
        """Entries under each node."""
        return self.stop - self.start

    def grow(self, row, start, stop, parent) -> np.ndarray:
        """Append nodes and return their indices."""
        new = {"row": row, "start": start, "stop": stop, "parent": parent}
        size = len(row)
        new |= {
            "first": np.zeros(size, np.int64),
            "count": np.zeros(size, np.int64),
            "distortion": np.full(size, np.nan),
        }
        begun = len(self)
        for name, value in new.items():
            setattr(self, name, np.concatenate([getattr(self, name), np.asarray(value)]))
        return np.arange(begun, begun + size)

    def split(self, node: np.ndarray, edges: np.ndarray) -> np.ndarray:
        """Split nodes [n] at ``edges`` [n, 2] (ascending; those at or outside the ends do not cut). Returns the
        children's indices."""
        bounds = np.concatenate([self.start[node, None], edges, self.stop[node, None]], 1)
        real = bounds[:, 1:] > bounds[:, :-1]
        children = real.sum(1)
        owner = np.repeat(node, children)
        made = self.grow(self.row[owner], bounds[:, :-1][real], bounds[:, 1:][real], owner)
        self.first[node] = made[0] + np.cumsum(children) - children if len(made) else 0
        self.count[node] = children
        return made

    def gain(self) -> np.ndarray:
        """Distortion that each node's split removes, not below 0; 0 where it is not split."""
        children = np.zeros(len(self))
        child = np.flatnonzero(self.parent >= 0)
        np.add.at(children, self.parent[child], self.distortion[child])
        return np.where(self.count > 0, np.maximum(self.distortion - children, 0), 0)


def explode(forest: Forest, node: np.ndarray) -> None:
    """Split nodes into all their single entries at once."""
    length = forest.length[node]
    owner = np.repeat(node, length)
    begun = np.cumsum(length) - length
    at = np.arange(len(owner)) - np.repeat(begun, length) + forest.start[owner]
    made = forest.grow(forest.row[owner], at, at + 1, owner)
    forest.first[node] = (made[0] if len(made) else 0) + begun
    forest.count[node] = length
    forest.distortion[made] = 0.0


def isolate(forest: Forest, node: np.ndarray, token: np.ndarray) -> np.ndarray:
    """Split ``node`` [n] down to the single ``token`` [n]s, the first of a node's tokens first: forced extraction.

    Tokens are entry indices of the node's row, listed by falling importance. Returns the leaf of each.
    """
    leaf = np.empty(len(node), np.int64)
    place = np.arange(len(node))
    while len(node):
        whole = forest.length[node] == 1
        leaf[place[whole]] = node[whole]
        node, token, place = node[~whole], token[~whole], place[~whole]
        if not len(node):
            break
        heads, lead = np.unique(node, return_index=True)
        forest.split(heads, np.stack([token[lead], token[lead] + 1], 1))
        begun = forest.first[node]
        child = begun.copy()
        for step in (1, 2):
            there = np.minimum(begun + step, begun + forest.count[node] - 1)
            child = np.where(token >= forest.start[there], there, child)
        node = child
    return leaf


def refine(of: Layer, forest: Forest, node: np.ndarray, turns: Tensor, candidates: int, rows: int) -> None:
    """Give nodes of one layer the split that removes most distortion per entry it costs.

    Either in two, at the middle or at one of the ``candidates`` sharpest turns, or around the most attended entry.

    Args:
        node: [n] nodes of at least two entries.
        turns: [R, N] curvature at each entry.
        rows: index of the layer's first row in the forest.
    """
    row = torch.from_numpy(forest.row[node] - rows)
    start, stop = torch.from_numpy(forest.start[node]), torch.from_numpy(forest.stop[node])
    whole = torch.from_numpy(forest.distortion[node])
    lone, cuts, worth = _choices(of, turns, row, start, stop, candidates)
    many = cuts.shape[1]
    ends, begins = torch.cat([cuts, lone[:, None]], 1), torch.cat([cuts, lone[:, None] + 1], 1)
    cost = split_costs(of, row, start, stop, ends, begins)
    left, right = cost[:, : many + 1], cost[:, many + 1 :]
    in_two = whole[:, None] - left[:, :many] - right[:, :many] + TURNING * worth
    in_two = in_two.masked_fill((cuts <= start[:, None]) | (cuts >= stop[:, None]), -torch.inf)
    best, at = in_two.max(1)
    inside = (lone > start) & (lone + 1 < stop)
    around = (whole - left[:, -1] - right[:, -1]) / (1 + inside.double())
    binary = best >= around
    cut = cuts.gather(1, at[:, None]).squeeze(1)
    edges = torch.stack([torch.where(binary, cut, lone), torch.where(binary, cut, lone + 1)], 1)
    forest.split(node, edges.numpy())
    chosen = torch.where(binary, at, many)[:, None]
    left, right = left.gather(1, chosen).squeeze(1), right.gather(1, chosen).squeeze(1)
    child = forest.first[node]
    last = child + forest.count[node] - 1
    single = forest.length
    for place, known in ((child, left), (last, right)):
        forest.distortion[place] = np.where(single[place] == 1, 0.0, known.numpy())
    middle = child[forest.count[node] == 3] + 1
    forest.distortion[middle] = 0.0


def _choices(
    of: Layer, turns: Tensor, row: Tensor, start: Tensor, stop: Tensor, candidates: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Most attended entry [n], cuts [n, K + 1] and how sharp the turn is there, min-max over the interval."""
    longest = int((stop - start).max())
    step = torch.arange(longest)
    used = step < (stop - start).unsqueeze(-1)
    index = start.unsqueeze(-1) + step.where(used, 0)
    attended = of.attended[row.unsqueeze(-1), index].masked_fill(~used, -torch.inf)
    lone = start + attended.argmax(1)
    curve = turns[row.unsqueeze(-1), index].double()
    low = curve.masked_fill(~used, torch.inf).amin(1, keepdim=True)
    high = curve.masked_fill(~used, -torch.inf).amax(1, keepdim=True)
    sharp = torch.where(high > low, (curve - low) / (high - low).clamp(min=1e-300), 0)
    order = curve.masked_fill(~used, -torch.inf).argsort(dim=1, descending=True, stable=True)[:, :candidates]
    middle = (stop - start)[:, None] // 2
    order = torch.where(order < (stop - start)[:, None], order, middle)  # shorter than ``candidates``
    order = torch.cat([order, middle], 1).sort(1).values  # the earliest of equals
    return lone, start[:, None] + order, sharp.gather(1, order)
