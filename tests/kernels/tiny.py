"""Single rows to merge in, and attention over them."""

import torch

from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.group import Groups

ADDITIVE = ("fixed", "convex", "zip")


def plain(k, v, tokens=None):
    """Entries of [B, Hkv, N, D] keys and values, ``tokens`` votes each."""
    if tokens is None:
        tokens = torch.ones(k.shape[:3], dtype=torch.int32)
    pos = torch.arange(k.shape[2], dtype=torch.int32).expand(k.shape[:3]).contiguous()
    return Entries(k, v, tokens.float().log(), tokens, pos)


def random(seed, slots=12, dim=8, scale=2.0, dtype=torch.float64, batch=1, heads=1, votes=True):
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(batch, heads, slots, dim, generator=g, dtype=torch.float64) * scale
    v = torch.randn(batch, heads, slots, dim, generator=g, dtype=torch.float64)
    tokens = torch.randint(1, 9, (batch, heads, slots), generator=g, dtype=torch.int32) if votes else None
    return plain(k.to(dtype), v.to(dtype), tokens)


def observe(q, slots):
    """Queries [B, Hq, W, D], the last positions of ``slots``."""
    width = q.shape[2]
    return Observation(q, torch.arange(slots - width, slots).expand(q.shape[0], -1).int(), q.shape[-1] ** -0.5)


def groups_of(assign, slots):
    """One row: ``assign`` maps each dropped entry to the retained entry it joins."""
    kept = [n for n in range(slots) if n not in assign]
    pairs = sorted((kept.index(c), n) for n, c in [*assign.items(), *((c, c) for c in set(assign.values()))])
    merged = torch.tensor([[[c in assign.values() for c in kept]]])
    index = torch.tensor([[kept]])
    groups = Groups(torch.tensor([n for _, n in pairs]), torch.tensor([c for c, _ in pairs]), merged)
    return index, torch.ones_like(index, dtype=torch.bool), groups


def attend(entries, q, scale):
    """Attention output of one row [N] for queries [R, D], in fp64."""
    logits = scale * q.double() @ entries.k[0, 0].double().T + entries.log_votes[0, 0].double()
    return logits.softmax(-1) @ entries.v[0, 0].double()


ASSIGN = {3: 1, 4: 1, 5: 1, 7: 6, 9: 8, 10: 8}


def pair(l_e, l_c):
    """Two entries with the given logits for the unit query, beside a third, and that query."""
    k = torch.tensor([[0.3, 0.1], [l_c, 0.4], [l_e, -0.2]], dtype=torch.float64)[None, None]
    v = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]], dtype=torch.float64)[None, None]
    q = torch.tensor([1.0, 0.0], dtype=torch.float64).reshape(1, 1, 1, 2)
    return plain(k, v), Observation(q, torch.tensor([[2]], dtype=torch.int32), 1.0)
