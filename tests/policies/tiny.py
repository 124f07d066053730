"""Tiny caches as a policy meets them, and the plain loops that policies are compared with."""

import torch

from kvpass.kernels.entries import Entries, Observation

HEADS, GROUP, DIM = 2, 2, 4


def prompt(length, layer, seed=0):
    """One sequence's entries and all its queries: (k, v, q)."""
    g = torch.Generator().manual_seed(1000 * seed + 17 * layer + length)

    def make(heads):
        return torch.randn(1, heads, length, DIM, generator=g, dtype=torch.float64) * 1.5

    return make(HEADS), make(HEADS), make(HEADS * GROUP)


def layers_of(policy, lengths, count=3, seed=0):
    """A padded batch of ``lengths`` as a policy meets it: ``count`` layers of (entries, observation)."""
    result = []
    longest = max(lengths)
    asked = [policy.observe(n) for n in lengths]
    where = [torch.arange(max(0, n - a), n) if isinstance(a, int) else a for n, a in zip(lengths, asked, strict=True)]
    width = max(len(w) for w in where)
    for layer in range(count):
        k = torch.randn(len(lengths), HEADS, longest, DIM, dtype=torch.float64)
        v = torch.randn_like(k)
        tokens = torch.zeros(len(lengths), HEADS, longest, dtype=torch.int32)
        pos = torch.full_like(tokens, -1)
        q = torch.randn(len(lengths), HEADS * GROUP, width, DIM, dtype=torch.float64)
        q_pos = torch.full((len(lengths), width), -1, dtype=torch.int32)
        for b, n in enumerate(lengths):
            own_k, own_v, own_q = prompt(n, layer, seed)
            k[b, :, :n], v[b, :, :n] = own_k[0], own_v[0]
            tokens[b, :, :n], pos[b, :, :n] = 1, torch.arange(n, dtype=torch.int32)
            start = width - len(where[b])
            q[b, :, start:], q_pos[b, start:] = own_q[0][:, where[b]], where[b].int()
        votes = torch.zeros(tokens.shape).masked_fill(tokens == 0, -torch.inf)
        seen = Observation(q, q_pos, 0.5)
        if policy.wants == "rehearsal":
            seen = rehearsed(seen, lengths, [len(policy.rehearsal(torch.arange(n))) for n in lengths], layer)
        result.append((Entries(k, v, votes, tokens, pos), seen))
    return result


def rehearsed(seen, lengths, counts, layer):
    """``seen`` with ``counts`` more queries, and their keys, behind each sequence of ``lengths``."""
    batch, more = len(lengths), max(counts)
    q = torch.randn(batch, HEADS * GROUP, more, DIM, dtype=torch.float64)
    k = torch.randn(batch, HEADS, more, DIM, dtype=torch.float64)
    pos = torch.full((batch, more), -1, dtype=torch.int32)
    for b, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        k[b, :, :count], _, q[b, :, :count] = (x[0] for x in prompt(count, layer, seed=n))
        pos[b, :count] = torch.arange(n, n + count, dtype=torch.int32)
    q, q_pos = torch.cat([seen.q, q], 2), torch.cat([seen.q_pos, pos], 1)
    return Observation(q, q_pos, seen.scale, own_k=k, own_pos=pos)


def kept(entries, b):
    """[heads] lists of the positions sequence ``b`` keeps."""
    return [entries.pos[b, h][entries.valid[b, h]].tolist() for h in range(entries.pos.shape[1])]


def pinned_order(length, sinks, window):
    """The order in which sinks and window claim a row's quota."""
    recent = list(range(max(0, length - window), length))
    first = [n for n in range(min(sinks, length)) if n != length - 1]
    return [length - 1, *first, *(n for n in reversed(recent) if n not in first and n != length - 1)]


def choose(score, quota, length, sinks, window):
    """Plain loops: pinned entries in their order, then the best scores, the earlier first on a tie."""
    pinned = pinned_order(length, sinks, window)
    rest = sorted((n for n in range(length) if n not in pinned), key=lambda n: (-score[n], n))
    return sorted((pinned + rest)[:quota])
