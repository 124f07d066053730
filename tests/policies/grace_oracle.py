"""GraceKV of one context in plain loops, for small sizes: what the batched version is compared with.

Everything is per (row = layer and KV head); ``k0`` are un-rotated keys, ``turn(x, p)`` rotates a key to position p.
"""

import heapq
from itertools import pairwise

import numpy as np


class Row:
    """A row's entries, relevance and probes: prototypes and their distortion by definition."""

    def __init__(self, k, v, relevance, pos, probes, seen, turn, multiplicity="coherence"):
        self.k, self.v, self.r, self.pos, self.turn = k, v, relevance, pos, turn
        self.k0 = np.stack([turn(x, -p) for x, p in zip(k, pos, strict=True)])
        self.multiplicity, self.seen, self.probes = multiplicity, seen, probes
        logits = np.where(np.arange(len(k)) < seen[:, None], probes @ k.T, -np.inf)
        self.peak = logits.max(1)
        self.mass = np.exp(logits - self.peak[:, None])
        self.total = self.mass.sum(1)

    def prototype(self, a, b):
        """(key, value, log-vote) of entries a .. b - 1."""
        if b - a == 1:
            return self.k[a], self.v[a], 0.0
        mean, n = self.k0[a:b].mean(0), b - a
        key = self.turn(mean, round(float(self.pos[a:b].mean())))
        weight = self.r[a:b] + 0.1 * self.r[a:b].mean() + 1e-30
        value = weight @ self.v[a:b] / weight.sum()
        coherence = np.linalg.norm(mean) / (np.linalg.norm(self.k0[a:b], axis=1).mean() + 1e-6)
        votes = n if self.multiplicity == "votes" else np.clip(n * coherence**2, 1, n)
        return key, value, np.log(votes)

    def distortion(self, a, b):
        ok = self.seen >= b
        if b - a <= 1 or not ok.any():
            return 0.0
        key, value, vote = self.prototype(a, b)
        mass = self.mass[ok, a:b]
        z, m = mass.sum(1), mass @ self.v[a:b]
        own = np.exp(self.probes[ok] @ key + vote - self.peak[ok])
        wrong = 0.25 * (z - own) ** 2 / (z**2 + 1e-12)
        wrong += 0.75 * ((m - own[:, None] * value) ** 2).sum(1) / ((m**2).sum(1) + 1e-12)
        return float(np.mean(z / self.total[ok] * wrong))

    def dropped(self, a, b):
        ok = self.seen >= b
        return float(np.mean(self.mass[ok, a:b].sum(1) / self.total[ok])) if ok.any() else 0.0


class Node:
    def __init__(self, row, a, b):
        self.a, self.b, self.children = a, b, None
        self.cost, self.worth = row.distortion(a, b), row.r[a:b].sum()


def build(row, a, b, turns, floor, candidates):
    """The whole tree over entries a .. b - 1."""
    root = Node(row, a, b)
    attended = (row.mass / row.total[:, None]).mean(0)
    todo = [root]
    while todo:
        node = todo.pop()
        if node.b - node.a == 1:
            continue
        inside = [t for t in floor if node.a <= t < node.b]

        def children(edges):
            return [Node(row, x, y) for x, y in pairwise(edges) if y > x]

        lone = max(inside, key=lambda t: row.r[t]) if inside else node.a + int(attended[node.a : node.b].argmax())
        node.children = children([node.a, lone, lone + 1, node.b])
        if not inside:
            around = (node.cost - sum(c.cost for c in node.children)) / (len(node.children) - 1)
            curve = turns[node.a : node.b]
            spread = curve.max() - curve.min()
            cuts = {int(x) + node.a for x in np.argsort(-curve, kind="stable")[:candidates]}
            best = (-np.inf, 0)
            for x in sorted(x for x in cuts | {node.a + (node.b - node.a) // 2} if node.a < x < node.b):
                sharp = (turns[x] - curve.min()) / spread if spread > 0 else 0.0
                gain = node.cost - row.distortion(node.a, x) - row.distortion(x, node.b) + 0.05 * sharp
                if gain > best[0]:
                    best = (gain, x)
            if best[0] >= around:
                node.children = children([node.a, best[1], node.b])
        todo += node.children
    return root


def allocate(trees, rows, omega, floor, budget, reserved):
    """Stored nodes (row, a, b) of ``trees`` [rows][slots]: the floor round robin, then one heap.

    ``floor`` [rows] are the tokens that must be exact, most needed first, already thinned.
    """
    stored = [[set() for _ in slots] for slots in trees]
    cap = int(reserved * budget)
    row_cap, spent, used = max(1, 4 * cap // len(trees)), [0] * len(trees), 0
    for rank in range(max(map(len, floor), default=0)):
        for r, tokens in enumerate(floor):
            if rank >= len(tokens):
                continue
            t, slot = tokens[rank], next(i for i, x in enumerate(trees[r]) if x.a <= tokens[rank] < x.b)
            path, cost = [], 0 if stored[r][slot] else 1
            node = trees[r][slot] if cost else next(x for x in stored[r][slot] if x.a <= t < x.b)
            while node.b - node.a > 1:
                path.append(node)
                cost += len(node.children) - 1
                node = next(c for c in node.children if c.a <= t < c.b)
            if used + cost > cap or spent[r] + cost > row_cap:
                continue
            stored[r][slot] |= set() if stored[r][slot] else {trees[r][slot]}
            for node in path:
                stored[r][slot] = stored[r][slot] - {node} | set(node.children)
            used, spent[r] = used + cost, spent[r] + cost
    heap = []

    def push(r, slot, node, adds):
        if adds:
            gain, cost = max(0, rows[r].dropped(node.a, node.b) - node.cost), 1
        elif node.children:
            gain, cost = max(0, node.cost - sum(c.cost for c in node.children)), len(node.children) - 1
        else:
            return
        heapq.heappush(heap, (-omega[r] * node.worth * gain / cost, push.turn, cost, r, slot, node, adds))
        push.turn += 1

    push.turn = 0
    for r, slots in enumerate(trees):
        for slot, root in enumerate(slots):
            if not stored[r][slot]:
                push(r, slot, root, True)
            for node in sorted(stored[r][slot], key=lambda x: x.a):
                push(r, slot, node, False)
    while heap and used < budget:
        _, _, cost, r, slot, node, adds = heapq.heappop(heap)
        if used + cost > budget:
            continue
        used += cost
        new = [node] if adds else node.children
        stored[r][slot] = stored[r][slot] - {node} | set(new)
        for x in new:
            push(r, slot, x, False)
    return {(r, x.a, x.b) for r, slots in enumerate(stored) for own in slots for x in own}, used


def slots(states, boundary, least=16, target=64, most=128):
    """Edges by the recurrence, states [L, N, E] unit vectors."""
    count = len(boundary)
    if count < 2 * least:
        return [0, count]

    def spread(a, e):
        steps = states[:, a + 1 : e] - states[:, a : e - 1]
        return steps.var(1, ddof=1).sum(-1).mean()

    best, back = np.full(count + 1, -np.inf), np.full(count + 1, -1)
    best[0] = 0
    for e in range(least, count + 1):
        for a in range(max(0, e - most), e - least + 1):
            cut = boundary[a - 1] - 1.0 if a else 0.0
            value = best[a] + cut - 0.25 * spread(a, e) - 0.1 * ((e - a - target) / target) ** 2
            if value > best[e]:
                best[e], back[e] = value, a
    edges = [count]
    while edges[-1]:
        edges.append(int(back[edges[-1]]))
    return edges[::-1]
