"""The operator ``kvpass::attend``: attention over a packed store, an exact tail and the new tokens.

Schema, fake and the choice of implementation. The arguments and the mathematics stand in
:mod:`kvpass.kernels.reference`.
"""

from __future__ import annotations

import torch

from kvpass.kernels import cpu, packed_sdpa, triton

# More query tokens than this amortise a matrix product, and SDPA's blocked kernel wins.
FUSED_QUERY_TOKENS = 16

_library = torch.library.Library("kvpass", "FRAGMENT")
_library.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor q_pos, "
    "Tensor store_k, Tensor store_v, Tensor log_votes, Tensor row_start, Tensor row_len, "
    "Tensor(a!) tail_k, Tensor(b!) tail_v, Tensor tail_pos, Tensor tail_at, "
    "float scale, int window, float softcap, Tensor? sinks=None, int chunk=0, bool writes=True) -> Tensor"
)


@torch.library.register_fake("kvpass::attend", lib=_library)
def _fake(q, k, v, *state):
    batch, heads, length, _ = q.shape
    # The memory of the SDPA it replaces: [B, S, Hq, Dv] seen as [B, Hq, S, Dv], so that the views which follow in
    # the graph stay views.
    return q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)


def implementation(q, k, v, q_pos, store_k, store_v, log_votes, row_start, row_len, tail_k, tail_v, *rest):
    """What attends to tensors of these types and layouts: for a few query tokens :mod:`kvpass.kernels.cpu` or
    :mod:`kvpass.kernels.triton`, else :mod:`kvpass.kernels.packed_sdpa`."""
    kernels = triton if q.device.type == "cuda" else cpu
    few = q.shape[2] <= FUSED_QUERY_TOKENS
    fused = few and kernels.supports_attend(q, k, v, store_k, store_v, log_votes, tail_k, tail_v)
    return kernels.attend if fused else packed_sdpa.attend


def _attend(*arguments):
    return implementation(*arguments)(*arguments)


_library.impl("attend", _attend, "CPU")
_library.impl("attend", _attend, "CUDA")

attend = torch.ops.kvpass.attend.default
