"""Building the trees of one sequence as far as its auction can reach, and storing the frontier."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvpass.budget import even_split
from kvpass.kernels import prototype
from kvpass.kernels.auction import ABSENT, SPLIT, STORED, Offer, auction, reserve
from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.flow import floor_candidates
from kvpass.kernels.score import compact
from kvpass.kernels.tree import Forest, explode, isolate, refine
from kvpass.policies.grace_context import Context, open_entries

AHEAD = 4  # levels split in one visit of a layer
PROMISE = 4  # times the last least utility that a node must promise to be split ahead of the auction
GROUP_CAP = 4  # times an even share of the reserved budget that one row may claim


@dataclass(frozen=True)
class Shape:
    """Which parts of the method are in use, see :class:`kvpass.policies.gracekv.GraceKV`."""

    multiplicity: prototype.Multiplicity
    unrotated: bool
    reserved: float
    candidates: int
    tree: bool
    across: bool


@dataclass(frozen=True)
class Market:
    """A sequence's trees and what was bought of them. Node intervals count a row's compressible entries."""

    context: Context
    shape: Shape
    forest: Forest
    first_row: np.ndarray  # [layers + 1] first row of each layer
    worth: np.ndarray  # [rows, M + 1] running relevance of a row's entries
    state: np.ndarray  # [nodes] int8

    def nodes(self, layer: int) -> np.ndarray:
        """Stored nodes of a layer by row and position."""
        row = self.forest.row
        own = (self.state == STORED) & (row >= self.first_row[layer]) & (row < self.first_row[layer + 1])
        found = np.flatnonzero(own)
        return found[np.lexsort((self.forest.start[found], row[found]))]


def frontier(context: Context, budget: int, shape: Shape) -> Market:
    """Spend ``budget`` entries, to the last one, on the context's compressible entries."""
    heads = [entries.k.shape[1] for entries, _ in context.layers]
    first_row = np.concatenate([[0], np.cumsum(heads)])
    forest, pos, worth = _plant(context)
    market = Market(context, shape, forest, first_row, worth, np.zeros(0, np.int8))
    roots = np.arange(len(forest))
    leaf, group = _floor(market, pos, budget)
    dropped = np.zeros(len(roots))
    wanted = roots[(forest.count[roots] == 0) & (forest.length[roots] > 1)]
    least = np.inf
    while True:
        _work(market, wanted, dropped, least)
        offer = _offer(market, roots, dropped)
        state, spent = reserve(offer, leaf, group, len(worth), *_caps(shape, budget, len(worth)))
        state, left, least = _sell(market, offer, state, budget, spent)
        open_nodes = (state == STORED) & (forest.count == 0) & (forest.length > 1)
        if not left and shape.across:  # utility is at most relevance times distortion
            open_nodes &= _weight(market) * forest.distortion > least
        wanted = np.flatnonzero(open_nodes)
        if not len(wanted):
            break
    state = _finish(market, roots, state, left)
    return replace(market, state=state, context=replace(context, layers=()))


def stored(market: Market | list[Tensor], single: tuple[Entries, Observation], layer: int) -> Entries:
    """What one layer [1, H, .] of a sequence keeps: exact entries bit for bit and prototypes, by position."""
    entries, _ = single
    if isinstance(market, list):
        return entries.take(*_padded(market[layer]))
    exact, device = market.context.exact[layer], entries.k.device
    forest, node = market.forest, market.nodes(layer)
    row, start, stop = (torch.from_numpy(x[node]).to(device) for x in (forest.row, forest.start, forest.stop))
    row = row - int(market.first_row[layer])
    index, _ = open_entries(entries, exact)
    several = stop - start > 1
    keep = exact.clone()
    keep[row[~several], index[row[~several], start[~several]]] = True
    # A prototype stands at the first of its entries until its own fields replace that entry's.
    place = index[row[several], start[several]]
    keep[row[several], place] = True
    out = entries.take(*_padded(keep))
    if not several.any():
        return out
    made = prototype.prototypes(_prepared(market, single, layer), row[several], start[several], stop[several])
    tokens = entries.tokens[0].gather(1, index).cumsum(1)
    tokens = torch.cat([tokens.new_zeros(len(tokens), 1), tokens], 1)
    count = tokens[row[several], stop[several]] - tokens[row[several], start[several]]
    slot = (keep.cumsum(1) - 1)[row[several], place]
    fields = {name: getattr(out, name).clone() for name in vars(out)}
    made_fields = {"k": made.k, "v": made.v, "log_votes": made.log_votes, "tokens": count, "pos": made.pos}
    for name, value in made_fields.items():
        fields[name][0, row[several], slot] = value.to(fields[name].dtype)
    return Entries(**fields)


def _padded(keep: Tensor) -> tuple[Tensor, Tensor]:
    """``keep`` [H, N] as indices and used slots with a batch dimension."""
    index, used = compact(keep)
    return index.unsqueeze(0), used.unsqueeze(0)


def _plant(context: Context) -> tuple[Forest, np.ndarray, np.ndarray]:
    """A root for every slot of every row that has entries in it; positions and running relevance of those entries."""
    edges = context.edges
    positions, worth, spans = [], [], []
    first = 0
    for (entries, _), exact in zip(context.layers, context.exact, strict=True):
        index, used = open_entries(entries, exact)
        pos = entries.pos[0].gather(1, index).long().masked_fill(~used, torch.iinfo(torch.int64).max)
        relevance = context.relevance[first : first + len(pos)].double()
        own = relevance.gather(1, pos.clamp(max=relevance.shape[1] - 1)).masked_fill(~used, 0)
        bounds = torch.searchsorted(pos, edges.to(pos.device).expand(len(pos), -1).contiguous()).cpu().numpy()
        rows, slots = np.nonzero(bounds[:, 1:] > bounds[:, :-1])
        spans.append((rows + first, bounds[rows, slots], bounds[rows, slots + 1]))
        positions.append(pos.cpu().numpy())
        worth.append(own.cpu().numpy())
        first += len(pos)
    most = max(x.shape[1] for x in positions)
    pos = np.concatenate([np.pad(x, ((0, 0), (0, most - x.shape[1])), constant_values=2**62) for x in positions])
    worth = np.concatenate([np.pad(x, ((0, 0), (1, most - x.shape[1]))) for x in worth]).cumsum(1)
    forest = Forest()
    row, start, stop = (np.concatenate(x) for x in zip(*spans, strict=True))
    forest.grow(row, start, stop, np.full(len(row), -1))
    return forest, pos, worth


def _caps(shape: Shape, budget: int, rows: int) -> tuple[int, int]:
    cap = int(shape.reserved * budget)
    return cap, max(1, GROUP_CAP * cap // max(rows, 1))


def _floor(market: Market, pos: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Leaves that must be exact, in the order they are realised, and their rows; their paths are built."""
    forest, shape = market.forest, market.shape
    cap, _ = _caps(shape, budget, len(pos))
    if not cap:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    relevance = market.context.relevance
    held = torch.zeros_like(relevance, dtype=torch.bool)
    rows, places = np.nonzero(pos < 2**62)
    held[torch.from_numpy(rows), torch.from_numpy(pos[rows, places])] = True
    chosen = [x.cpu().numpy() for x in floor_candidates(relevance, held)]
    total = sum(map(len, chosen))
    if total > cap:
        chosen = [x[: max(1, len(x) * cap // total)] for x in chosen]
    rank = np.concatenate([np.arange(len(x)) for x in chosen])
    row = np.concatenate([np.full(len(x), r) for r, x in enumerate(chosen)])
    token = np.concatenate([np.searchsorted(pos[r], x) for r, x in enumerate(chosen)])
    order = np.lexsort((row, rank))
    row, token = row[order], token[order]
    # Roots are sorted by row and start.
    width = pos.shape[1] + 1
    roots = np.searchsorted(forest.row * width + forest.start, row * width + token, side="right") - 1
    value = market.worth[row, token + 1] - market.worth[row, token]
    if not shape.tree:
        nodes = np.unique(roots)
        explode(forest, nodes[forest.length[nodes] > 1])
        single = forest.count[roots] == 0
        return np.where(single, roots, forest.first[roots] + token - forest.start[roots]), row
    best = np.argsort(-value, kind="stable")
    leaf = np.empty(len(token), np.int64)
    leaf[best] = isolate(forest, roots[best], token[best])
    return leaf, row


def _work(market: Market, wanted: np.ndarray, dropped: np.ndarray, least: float) -> None:
    """Judge the nodes that have not been judged and split ``wanted``; the first time also price leaving roots out.

    Preparing a layer costs as much as splitting its nodes, so new nodes that promise far more than the ``least``
    utility that an auction paid last are split in the same visit. What it pays only rises as more is offered.
    """
    forest, shape = market.forest, market.shape
    fresh = np.flatnonzero(np.isnan(forest.distortion))
    begin = len(fresh) and forest.parent[fresh[0]] < 0  # roots come first
    turns = market.context.turns
    if not shape.tree:
        explode(forest, wanted)
    for index in range(len(market.first_row) - 1):
        low, high = market.first_row[index], market.first_row[index + 1]
        own = fresh[(forest.row[fresh] >= low) & (forest.row[fresh] < high)]
        split = wanted[(forest.row[wanted] >= low) & (forest.row[wanted] < high)]
        if not len(own) and (not shape.tree or not len(split)):
            continue
        of = _prepared(market, market.context.layers[index], index)
        row, start, stop = (torch.from_numpy(x[own]) for x in (forest.row - low, forest.start, forest.stop))
        forest.distortion[own] = prototype.distortion(of, row, start, stop).cpu().numpy()
        if begin:
            root = own[own < len(dropped)]
            count = len(root)
            dropped[root] = prototype.drop_distortion(of, row[:count], start[:count], stop[:count]).cpu().numpy()
        if len(split) and shape.tree:
            curve = turns[of.pos.clamp(min=0, max=len(turns) - 1)]
            for _ in range(AHEAD):
                begun = len(forest)
                refine(of, forest, split, curve, shape.candidates, int(low))
                made = np.arange(begun, len(forest))
                promise = _weight(market, made) * forest.distortion[made]
                split = made[(promise > PROMISE * least) & (forest.length[made] > 1)]
                if not len(split):
                    break


def _prepared(market: Market, single: tuple[Entries, Observation], layer: int) -> prototype.Layer:
    """The layer's compressible entries with the queries that judge."""
    entries, seen = single
    context = market.context
    index, used = open_entries(entries, context.exact[layer])
    heads = entries.k.shape[1]
    own = entries.take(index.unsqueeze(0), used.unsqueeze(0))
    group = seen.q.shape[1] // heads
    probes = context.probes.to(seen.q.device)
    turn = torch.arange(len(probes), device=probes.device) % group
    head = torch.arange(heads, device=probes.device).unsqueeze(1) * group + turn
    low = int(market.first_row[layer])
    relevance = context.relevance[low : low + heads]
    return prototype.layer(
        own.k[0],
        own.v[0],
        own.log_votes[0],
        own.pos[0],
        relevance.gather(1, own.pos[0].long().clamp(min=0)),
        seen.q[0][head, probes],
        seen.q_pos[0, probes].long().expand(heads, -1),
        seen,
        multiplicity=market.shape.multiplicity,
        unrotated=market.shape.unrotated,
    )


def _weight(market: Market, node: np.ndarray | slice = slice(None)) -> np.ndarray:
    """Relevance times head sensitivity of nodes."""
    forest, worth = market.forest, market.worth
    row = forest.row[node]
    omega = market.context.sensitivity.cpu().numpy()[row]
    return omega * (worth[row, forest.stop[node]] - worth[row, forest.start[node]])


def _offer(market: Market, roots: np.ndarray, dropped: np.ndarray) -> Offer:
    forest, weight = market.forest, _weight(market)
    return Offer(
        roots=roots,
        added=weight[roots] * np.maximum(dropped - forest.distortion[roots], 0),
        parent=forest.parent,
        first=forest.first,
        count=forest.count,
        split=weight * forest.gain() / np.maximum(forest.count - 1, 1),
    )


def _sell(market: Market, offer: Offer, state: np.ndarray, budget: int, spent: int) -> tuple[np.ndarray, int, float]:
    """One auction of what the floor left, over all rows or row by row."""
    if market.shape.across:
        return auction(offer, state, budget - spent)
    forest = market.forest
    row = forest.row
    rows = len(market.worth)
    available = np.bincount(row[offer.roots], forest.length[offer.roots], minlength=rows).astype(np.int64)
    share = even_split(torch.tensor([budget]), torch.from_numpy(available)[None])[0].numpy()
    owned = np.bincount(row[state == STORED], minlength=rows)
    left = budget - spent  # less than the shares' rest where the floor gave a row more than its share
    for one in range(rows):
        own = row[offer.roots] == one
        part = replace(offer, roots=offer.roots[own], added=offer.added[own])
        allowed = min(left, max(0, int(share[one] - owned[one])))
        state, rest, _ = auction(part, state, allowed)
        left -= allowed - rest
    return state, left, 0.0


def _finish(market: Market, roots: np.ndarray, state: np.ndarray, left: int) -> np.ndarray:
    """Spend what no offer was cheap enough for: halve the stored nodes with most at stake, then add roots."""
    forest = market.forest
    while left > 0:
        several = np.flatnonzero((state == STORED) & (forest.length > 1))
        if len(several):
            stake = (_weight(market) * np.nan_to_num(forest.distortion))[several]
            node = several[np.argsort(-stake, kind="stable")][:left]
            middle = forest.start[node] + forest.length[node] // 2
            made = forest.split(node, np.stack([middle, middle], 1))
            state[node] = SPLIT
            state = np.concatenate([state, np.full(len(made), STORED, np.int8)])
        else:
            node = roots[state[roots] == ABSENT][:left]
            state[node] = STORED
        left -= len(node)
    return state
