"""The kernels of decode: softmax over tiles of store and tail in parts, then the parts of each row in their order.

A row is one (sequence, KV head). Its queries, the group's heads of each new token, fill one tile of a matrix product:
query ``m`` is head ``m % G`` of token ``m // G``. How many tiles there are follows from capacities, which the host
knows; which row of the store a tile belongs to is found from ``row_len`` on the device. So the grid is the same at
every step: nothing waits for the host and a CUDA graph stays valid. Logits are in powers of two.
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tiles(ROW_LEN, rows, capacity, chunk, BLOCK_R: tl.constexpr):
    """Entries per tile and each row's number of tiles. Rows may share entries, as those of beams do, and then hold
    more than the store: longer tiles keep their number within the grid."""
    r = tl.arange(0, BLOCK_R)
    length = tl.load(ROW_LEN + r, mask=r < rows, other=0)
    held = tl.sum(length.to(tl.int64), 0)
    chunk = (chunk * tl.maximum(tl.cdiv(held, tl.maximum(capacity, 1)), 1)).to(tl.int32)
    return chunk, tl.cdiv(length, chunk)


@triton.jit
def _queries(
    Q, Q_POS, b, h, tokens, q_b, q_h, q_s, q_pos_b,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """This program's queries [M, Dk] and their positions."""
    query = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = query < GROUP * tokens
    token = query // GROUP
    d = tl.arange(0, BLOCK_K)
    at = (query % GROUP)[:, None] * q_h + token[:, None] * q_s + d[None, :]
    inside = real[:, None] & (d[None, :] < KEY_DIM)
    q = tl.load(Q + b * q_b + h * GROUP * q_h + at, mask=inside, other=0.0).to(TYPE)
    return q, tl.load(Q_POS + b * q_pos_b + token, mask=real, other=-1)


@triton.jit
def _fold(
    m, l, acc, q, K, V, k_n, v_n, here, seen, votes, qk_scale, softcap,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of keys, from K and V on, into the running softmax (m, l, acc). ``here`` [N]: keys that may be read;
    ``seen`` [M, N] or [1, N]: what each query sees of them."""
    n = tl.arange(0, BLOCK_N)
    dk = tl.arange(0, BLOCK_K)
    dv = tl.arange(0, BLOCK_V)
    k = tl.load(K + n[:, None] * k_n + dk[None, :], mask=here[:, None] & (dk[None, :] < KEY_DIM), other=0.0)
    x = tl.dot(q, tl.trans(k.to(TYPE)), input_precision=PRECISION) * qk_scale
    if SOFTCAP:
        x = _capped(x, softcap)
    x = tl.where(seen, x + votes[None, :], float("-inf"))
    top = tl.maximum(m, tl.max(x, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(x - safe[:, None])
    shrink = tl.exp2(m - safe)
    v = tl.load(V + n[:, None] * v_n + dv[None, :], mask=here[:, None] & (dv[None, :] < VALUE_DIM), other=0.0)
    acc = tl.dot(p.to(TYPE), v.to(TYPE), acc * shrink[:, None], input_precision=PRECISION)
    return top, l * shrink + tl.sum(p, 1), acc


@triton.jit
def _capped(x, softcap):
    """softcap * tanh(logit / softcap) in powers of two, for x = 2 log2(e) logit / softcap."""
    return (softcap - 2 * softcap / (tl.exp2(x) + 1)) * _LOG2E


@triton.jit
def _save(
    m, l, acc, tile, tokens, PART_ML, PART_O,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    dv = tl.arange(0, BLOCK_V)
    real = query < GROUP * tokens
    first = tile.to(tl.int64) * (GROUP * tokens)
    tl.store(PART_ML + first * 2 + query * 2, m, mask=real)
    tl.store(PART_ML + first * 2 + query * 2 + 1, l, mask=real)
    inside = real[:, None] & (dv[None, :] < VALUE_DIM)
    tl.store(PART_O + first * VALUE_DIM + query[:, None] * VALUE_DIM + dv[None, :], acc, mask=inside)


@triton.jit
def store_softmax(
    Q, Q_POS, STORE_K, STORE_V, LOG_VOTES, ROW_START, ROW_LEN, PART_ML, PART_O,
    rows, kv_heads, capacity, tokens, chunk, q_b, q_h, q_s, q_pos_b, k_n, v_n, qk_scale, softcap,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (store tiles, blocks of queries). Writes max and sum to PART_ML [tile, M, 2] and the values, not divided
    by the sum, to PART_O [tile, M, Dv]; all fp32."""
    t = tl.program_id(0)
    chunk, tiles = _tiles(ROW_LEN, rows, capacity, chunk, BLOCK_R)
    row = tl.sum((tl.cumsum(tiles, 0) <= t).to(tl.int32), 0)
    if row >= rows:
        return
    at = t - tl.sum(tl.where(tl.arange(0, BLOCK_R) < row, tiles, 0), 0)
    b = (row // kv_heads).to(tl.int64)
    h = (row % kv_heads).to(tl.int64)
    q, _ = _queries(
        Q, Q_POS, b, h, tokens, q_b, q_h, q_s, q_pos_b, GROUP, KEY_DIM, BLOCK_K, BLOCK_M, TYPE
    )  # fmt: skip
    n = tl.arange(0, BLOCK_N)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    start = tl.load(ROW_START + row)
    end = tl.minimum(tl.load(ROW_LEN + row), (at + 1) * chunk)
    for i in range(at * chunk, end, BLOCK_N):
        here = i + n < end
        votes = tl.load(LOG_VOTES + start + i + n, mask=here, other=float("-inf")) * _LOG2E
        m, l, acc = _fold(
            m, l, acc, q, STORE_K + (start + i) * k_n, STORE_V + (start + i) * v_n, k_n, v_n,
            here, (votes > float("-inf"))[None, :], votes, qk_scale, softcap,
            KEY_DIM, VALUE_DIM, BLOCK_K, BLOCK_V, BLOCK_N, SOFTCAP, TYPE, PRECISION,
        )  # fmt: skip
    _save(m, l, acc, t, tokens, PART_ML, PART_O, GROUP, VALUE_DIM, BLOCK_V, BLOCK_M)


@triton.jit
def tail_softmax(
    Q, Q_POS, TAIL_K, TAIL_V, TAIL_POS, PART_ML, PART_O,
    kv_heads, slots, tokens, chunk, window, span, q_b, q_h, q_s, q_pos_b, tail_pos_b,
    k_b, k_h, k_n, v_b, v_h, v_n, store_tiles, tail_tiles, qk_scale, softcap,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (rows * tail tiles, blocks of queries): as :func:`store_softmax`, after the store's tiles."""
    t = tl.program_id(0)
    row = t // tail_tiles
    at = t % tail_tiles
    b = (row // kv_heads).to(tl.int64)
    h = (row % kv_heads).to(tl.int64)
    q, position = _queries(
        Q, Q_POS, b, h, tokens, q_b, q_h, q_s, q_pos_b, GROUP, KEY_DIM, BLOCK_K, BLOCK_M, TYPE
    )  # fmt: skip
    oldest = tl.maximum(position - window + 1, position - position % span)
    n = tl.arange(0, BLOCK_N)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    votes = tl.zeros([BLOCK_N], tl.float32)
    end = tl.minimum(slots, (at + 1) * chunk)
    for i in range(at * chunk, end, BLOCK_N):
        pos = tl.load(TAIL_POS + b * tail_pos_b + i + n, mask=i + n < end, other=-1)
        seen = (pos >= 0)[None, :] & (pos[None, :] <= position[:, None]) & (pos[None, :] >= oldest[:, None])
        here = tl.max(seen.to(tl.int32), 0) > 0
        slot = tl.cast(i, tl.int64)
        m, l, acc = _fold(
            m, l, acc, q, TAIL_K + b * k_b + h * k_h + slot * k_n, TAIL_V + b * v_b + h * v_h + slot * v_n,
            k_n, v_n, here, seen, votes, qk_scale, softcap,
            KEY_DIM, VALUE_DIM, BLOCK_K, BLOCK_V, BLOCK_N, SOFTCAP, TYPE, PRECISION,
        )  # fmt: skip
    _save(m, l, acc, store_tiles + t, tokens, PART_ML, PART_O, GROUP, VALUE_DIM, BLOCK_V, BLOCK_M)


@triton.jit
def _merge(m, l, acc, first, count, query, queries, PART_ML, PART_O,
           VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    dv = tl.arange(0, BLOCK_V)
    for i in range(0, count, BLOCK_T):
        j = i + tl.arange(0, BLOCK_T)
        held = j < count
        part = (first + j).to(tl.int64) * queries + query
        part_m = tl.load(PART_ML + part * 2, mask=held, other=float("-inf"))
        part_l = tl.load(PART_ML + part * 2 + 1, mask=held, other=0.0)
        inside = held[:, None] & (dv[None, :] < VALUE_DIM)
        part_o = tl.load(PART_O + part[:, None] * VALUE_DIM + dv[None, :], mask=inside, other=0.0)
        top = tl.maximum(m, tl.max(part_m, 0))
        safe = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(part_m - safe)
        shrink = tl.exp2(m - safe)
        l = l * shrink + tl.sum(part_l * weight, 0)
        acc = acc * shrink + tl.sum(part_o * weight[:, None], 0)
        m = top
    return m, l, acc


@triton.jit
def merge_and_append(
    PART_ML, PART_O, OUT, SINKS, Q, Q_POS, ROW_LEN, NEW_K, NEW_V, TAIL_K, TAIL_V, TAIL_AT,
    rows, kv_heads, capacity, slots, tokens, chunk, window, span, q_b, q_h, q_s,
    k_b, k_h, k_s, v_b, v_h, v_s, tk_b, tk_h, tk_s, tv_b, tv_h, tv_s, q_pos_b, store_tiles, tail_tiles,
    qk_scale, softcap,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """Grid (rows, queries of a row). The partials enter in the order of the tiles whatever order they were made in,
    then the new tokens and the sink. Program (row, s) also writes new token s into the tail, whose readers ran
    before."""
    row = tl.program_id(0)
    query = tl.program_id(1)
    queries = GROUP * tokens
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_V], tl.float32)
    if store_tiles > 0:
        _, tiles = _tiles(ROW_LEN, rows, capacity, chunk, BLOCK_R)
        r = tl.arange(0, BLOCK_R)
        first = tl.sum(tl.where(r < row, tiles, 0), 0)
        count = tl.sum(tl.where(r == row, tiles, 0), 0)
        m, l, acc = _merge(
            m, l, acc, first, count, query, queries, PART_ML, PART_O, VALUE_DIM, BLOCK_V, BLOCK_T
        )  # fmt: skip
    m, l, acc = _merge(
        m, l, acc, store_tiles + row * tail_tiles, tail_tiles, query, queries, PART_ML, PART_O,
        VALUE_DIM, BLOCK_V, BLOCK_T,
    )  # fmt: skip
    b = (row // kv_heads).to(tl.int64)
    h = (row % kv_heads).to(tl.int64)
    token = query // GROUP
    head = h * GROUP + query % GROUP
    dk = tl.arange(0, BLOCK_K)
    dv = tl.arange(0, BLOCK_V)
    K = NEW_K + b * k_b + h * k_h + dk
    V = NEW_V + b * v_b + h * v_h + dv
    position = tl.load(Q_POS + b * q_pos_b + token)
    oldest = tl.maximum(position - window + 1, position - position % span)
    q = tl.load(Q + b * q_b + head * q_h + token * q_s + dk, mask=dk < KEY_DIM, other=0.0).to(tl.float32)
    for s in range(0, tokens):
        pos = tl.load(Q_POS + b * q_pos_b + s)
        if (pos >= 0) & (pos <= position) & (pos >= oldest):
            k = tl.load(K + s * k_s, mask=dk < KEY_DIM, other=0.0).to(tl.float32)
            v = tl.load(V + s * v_s, mask=dv < VALUE_DIM, other=0.0).to(tl.float32)
            x = tl.sum(q * k, 0) * qk_scale
            if SOFTCAP:
                x = _capped(x, softcap)
            top = tl.maximum(m, x)
            shrink = tl.exp2(m - top)
            weight = tl.exp2(x - top)
            l = l * shrink + weight
            acc = acc * shrink + v * weight
            m = top
    if HAS_SINKS:
        sink = tl.load(SINKS + head).to(tl.float32) * _LOG2E
        top = tl.maximum(m, sink)
        shrink = tl.exp2(m - top)  # 0 where nothing is seen: a sink alone has no value
        l = l * shrink + tl.exp2(sink - top)
        acc = acc * shrink
    result = tl.where(position >= 0, acc / tl.where(l == 0.0, 1.0, l), 0.0)
    out = ((b * tokens + token) * (kv_heads * GROUP) + head) * VALUE_DIM
    tl.store(OUT + out + dv, result.to(OUT.dtype.element_ty), mask=dv < VALUE_DIM)
    if WRITES:  # noqa: SIM102  (decided when compiling)
        if query < tokens and query >= tokens - slots:
            slot = (tl.load(TAIL_AT) + query) % slots
            k = tl.load(K + query * k_s, mask=dk < KEY_DIM)
            v = tl.load(V + query * v_s, mask=dv < VALUE_DIM)
            to_k = TAIL_K + b * tk_b + h * tk_h + slot * tk_s + dk
            to_v = TAIL_V + b * tv_b + h * tv_h + slot * tv_s + dv
            tl.store(to_k, k.to(TAIL_K.dtype.element_ty), mask=dk < KEY_DIM)
            tl.store(to_v, v.to(TAIL_V.dtype.element_ty), mask=dv < VALUE_DIM)
