"""How much attention observed queries pay: their log-sum-exp in parts of the keys, then sums over queries per key.

A row is one (sequence, KV head). Nothing of size queries x keys exists, no sum is atomic. Logits are in powers of two.
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _logits(
    Q, K, VOTES, POS, Q_POS, b, h, g, w, n, width, slots, q_b, q_h, q_w, k_b, k_h, k_n, vote_b, vote_h, pos_b, pos_h,
    q_pos_b, qk_scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """[W, N] logits with votes; -inf where a query does not see or is unused."""
    d = tl.arange(0, BLOCK_D)
    inside = (n < slots)[:, None] & (d[None, :] < DIM)
    k = tl.load(K + b * k_b + h * k_h + n.to(tl.int64)[:, None] * k_n + d[None, :], mask=inside, other=0.0)
    q_at = Q + b * q_b + (h * GROUP + g) * q_h + w.to(tl.int64)[:, None] * q_w + d[None, :]
    q = tl.load(q_at, mask=(w < width)[:, None] & (d[None, :] < DIM), other=0.0)
    votes = tl.load(VOTES + b * vote_b + h * vote_h + n, mask=n < slots, other=float("-inf"))
    position = tl.load(Q_POS + b * q_pos_b + w, mask=w < width, other=-1)
    seen = (position >= 0)[:, None] & (votes > float("-inf"))[None, :]
    if CAUSAL:
        pos = tl.load(POS + b * pos_b + h * pos_h + n, mask=n < slots, other=0)
        seen = seen & (pos[None, :] <= position[:, None])
    x = tl.dot(q.to(TYPE), tl.trans(k.to(TYPE)), input_precision=PRECISION) * qk_scale + (votes * _LOG2E)[None, :]
    return tl.where(seen, x, float("-inf"))


@triton.jit
def probe_lse(
    Q, K, VOTES, POS, Q_POS, LSE, kv_heads, width, slots, chunk, q_b, q_h, q_w, k_b, k_h, k_n, vote_b, vote_h, pos_b,
    pos_h, q_pos_b, qk_scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of queries, rows * G, parts of ``chunk`` keys). Writes LSE [part, rows, G, W] fp32, base 2."""
    at = tl.program_id(1)
    b = (at // GROUP // kv_heads).to(tl.int64)
    h = (at // GROUP % kv_heads).to(tl.int64)
    g = at % GROUP
    w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    first = tl.program_id(2) * chunk
    m = tl.full([BLOCK_W], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_W], tl.float32)
    for i in range(first, tl.minimum(first + chunk, slots), BLOCK_N):
        x = _logits(
            Q, K, VOTES, POS, Q_POS, b, h, g, w, i + tl.arange(0, BLOCK_N), width, slots, q_b, q_h, q_w, k_b, k_h,
            k_n, vote_b, vote_h, pos_b, pos_h, q_pos_b, qk_scale, GROUP, DIM, BLOCK_D, CAUSAL, TYPE, PRECISION,
        )  # fmt: skip
        top = tl.maximum(m, tl.max(x, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        l = l * tl.exp2(m - safe) + tl.sum(tl.exp2(x - safe[:, None]), 1)
        m = top
    lse = tl.where(l == 0.0, float("-inf"), m + tl.log2(tl.where(l == 0.0, 1.0, l)))
    part = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + at
    tl.store(LSE + part * width + w, lse, mask=w < width)


@triton.jit
def column_sums(
    Q, K, VOTES, POS, Q_POS, LSE, OUT, kv_heads, width, slots, q_b, q_h, q_w, k_b, k_h, k_n, vote_b, vote_h, pos_b,
    pos_h, q_pos_b, qk_scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of keys, rows * G). Writes OUT [rows, G, N] fp32: softmax weights summed over the queries."""
    at = tl.program_id(1)
    b = (at // GROUP // kv_heads).to(tl.int64)
    h = (at // GROUP % kv_heads).to(tl.int64)
    g = at % GROUP
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for i in range(0, width, BLOCK_W):
        w = i + tl.arange(0, BLOCK_W)
        held = slots
        if PRECISION == "ieee":
            held = tl.where(i < width, slots, 0)  # always slots, but keys kept in registers over the loop would spill
        x = _logits(
            Q, K, VOTES, POS, Q_POS, b, h, g, w, n, width, held, q_b, q_h, q_w, k_b, k_h,
            k_n, vote_b, vote_h, pos_b, pos_h, q_pos_b, qk_scale, GROUP, DIM, BLOCK_D, CAUSAL, TYPE, PRECISION,
        )  # fmt: skip
        lse = tl.load(LSE + at.to(tl.int64) * width + w, mask=w < width, other=float("-inf"))
        safe = tl.where(lse == float("-inf"), 0.0, lse)  # such a query sees nothing: its logits are -inf
        total += tl.sum(tl.exp2(x - safe[:, None]), 0)
    tl.store(OUT + at.to(tl.int64) * slots + n, total, mask=n < slots)
