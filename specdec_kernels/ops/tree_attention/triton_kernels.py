"""The Triton kernels of tree_attention: attention over a part of the cache, and the sum of parts.

A row is a pair of slot and query head; the rows of all heads that share a K/V head stand side by
side, row = slot * G + head, and share each tile of K and V.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LN2 = tl.constexpr(math.log(2))
INF = tl.constexpr(float("inf"))


@triton.jit
def _tanh(x):
    """The polynomial is that of Cephes: near 0 the quotient loses the small result's digits."""
    z = x * x
    p = tl.fma(z, -5.70498872745e-3, 2.06390887954e-2)
    p = tl.fma(z, p, -5.37397155531e-2)
    p = tl.fma(z, p, 1.33314422036e-1)
    p = tl.fma(z, p, -3.33332819422e-1)
    far = 1 - 2 / (1 + tl.exp2(tl.abs(x) * (2 / LN2)))
    return tl.where(tl.abs(x) < 0.625, tl.fma(p * z, x, x), tl.where(x < 0, -far, far))


@triton.jit
def _load_keys(
    cache_ptr, table_ptr, start, stride_page, stride_slot, used,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_DIM] of K or V from slot `start` on, 0 where not `used` and past DIM."""
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_DIM)
    if PAGE == 0:
        cache_ptr += tl.cast(start, tl.int64) * stride_slot
        slots = n * stride_slot
    elif PAGE % BLOCK_N == 0:
        page = tl.load(table_ptr + start // PAGE).to(tl.int64)
        cache_ptr += page * stride_page + tl.cast(start % PAGE, tl.int64) * stride_slot
        slots = n * stride_slot
    else:
        table_ptr += (start + n) // PAGE
        page = tl.load(table_ptr, used, 0) if MASKED else tl.load(table_ptr)
        slots = page.to(tl.int64) * stride_page + (start + n) % PAGE * stride_slot
    pointers = cache_ptr + slots[:, None] + d[None, :]
    if MASKED:
        return tl.load(pointers, used[:, None] & (d < DIM)[None, :], 0.0)
    elif BLOCK_DIM != DIM:
        return tl.load(pointers, (d < DIM)[None, :], 0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _ancestors(mask_ptr, t, first, stride_mask, mask_words, valid, BLOCK_N: tl.constexpr):
    """Which of the BLOCK_N slots of the window from `first` on, maybe below 0, each row sees."""
    word, shift = first >> 6, (first & 63).to(tl.uint64)
    mask_ptr += t * stride_mask + word
    low = tl.load(mask_ptr, valid & (word >= 0) & (word < mask_words), 0)
    high = tl.load(mask_ptr + 1, valid & (word + 1 >= 0) & (word + 1 < mask_words), 0)
    low, high = low.to(tl.uint64, bitcast=True), high.to(tl.uint64, bitcast=True)
    bits = (low >> shift) | ((high << 1) << (63 - shift))
    n = tl.arange(0, BLOCK_N)  # 32 bits are shifted in one step, 64 are not
    half = bits.to(tl.uint32)[:, None]
    if BLOCK_N > 32:
        half = tl.where((n < 32)[None, :], half, (bits >> 32).to(tl.uint32)[:, None])
    return ((half >> (n & 31).to(tl.uint32)[None, :]) & 1) != 0


@triton.jit
def _visible(
    start, t, offset_t, prefix, nodes, lowest, stop, window, mask_ptr, depth_ptr, stride_mask,
    mask_words, TREE: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Which keys from slot `start` on are used at all, [BLOCK_N], and by which rows."""
    n = tl.arange(0, BLOCK_N)
    key = start + n - prefix  # slot of the window; negative in the prefix
    used = (start + n >= lowest) & (start + n < stop)
    if TREE:
        first = start - prefix
        seen = _ancestors(mask_ptr, t, first, stride_mask, mask_words, t < nodes, BLOCK_N)
        sees = (key < 0)[None, :] | seen
    else:
        sees = key[None, :] <= t[:, None]
    if WINDOW:
        offset = key
        if TREE:
            drafted = (key >= 0) & (key < nodes)
            offset = tl.where(drafted, tl.load(depth_ptr + key, drafted, 0), key)
        sees = sees & (offset_t[:, None] - offset[None, :] < window)
    return used, sees & used[None, :]


@triton.jit
def _attend(
    q, m, total, acc, start, t, offset_t, prefix, nodes, lowest, stop, window, mask_ptr, depth_ptr,
    stride_mask, mask_words, k_ptr, v_ptr, table_ptr, stride_kb, stride_ks, stride_vb, stride_vs,
    scale, softcap, TREE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PAGE: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, in powers of two: maximum, sum and weighted values."""
    used = None
    if MASKED:
        used, sees = _visible(
            start, t, offset_t, prefix, nodes, lowest, stop, window, mask_ptr, depth_ptr,
            stride_mask, mask_words, TREE, WINDOW, BLOCK_N,
        )  # fmt: skip
    k = _load_keys(
        k_ptr, table_ptr, start, stride_kb, stride_ks, used, D, BLOCK_D, PAGE, BLOCK_N, MASKED
    )
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP:
        scores = _tanh(scores * scale) * softcap
        scale = 1.0
    if MASKED:
        scores = tl.where(sees, scores, -INF)
    highest = tl.maximum(m, tl.max(scores, 1) * scale)
    shift = highest
    if MASKED:
        shift = tl.where(highest == -INF, 0.0, highest)  # a row that has seen nothing yet
    p = tl.exp2(tl.fma(scores, scale, -shift[:, None]))
    rescale = tl.exp2(m - shift)
    v = _load_keys(
        v_ptr, table_ptr, start, stride_vb, stride_vs, used, DV, BLOCK_DV, PAGE, BLOCK_N, MASKED
    )
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return highest, tl.fma(total, rescale, tl.sum(p, 1)), acc


@triton.jit
def _add_sink(m, total, acc, sink):
    """Maximum, sum and weighted values with one more logit, whose value is 0."""
    sink = sink / LN2
    highest = tl.maximum(m, sink)
    shift = tl.where(highest == -INF, 0.0, highest)
    rescale = tl.exp2(m - shift)
    return highest, total * rescale + tl.exp2(sink - shift), acc * rescale[:, None]


@triton.jit(do_not_specialize=["size", "num_slots", "num_splits", "split_size", "window"])
def _tree_attention_kernel(
    q_ptr, k_ptr, v_ptr, prefix_len_ptr, num_nodes_ptr, mask_ptr, depth_ptr, sinks_ptr, table_ptr,
    out_ptr, lse_ptr, stride_qb, stride_qt, stride_qh, stride_kb, stride_kh, stride_ks, stride_vb,
    stride_vh, stride_vs, stride_mb, stride_mt, stride_db, stride_tb, size, num_slots, num_splits,
    split_size, window, mask_words, scale, softcap,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, TREE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, NEGATE: tl.constexpr,
    SPLIT: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.cdiv(size * G, BLOCK_M)
    split, first_row = tl.program_id(0) // row_blocks, tl.program_id(0) % row_blocks * BLOCK_M
    kv_head, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    nodes = tl.minimum(tl.load(num_nodes_ptr + b), size)
    prefix = tl.load(prefix_len_ptr + b)
    rows = first_row + tl.arange(0, BLOCK_M)
    t, group = rows // G, rows % G
    valid = t < nodes
    mask_ptr += b * stride_mb
    depth_ptr += b * stride_db
    table_ptr += b * stride_tb

    # These rows see slots from `lowest` to `stop`, and from `clear` on all of them all the prefix.
    stop = tl.minimum(prefix + nodes, num_slots)
    if not TREE:
        stop = tl.minimum(stop, prefix + (first_row + BLOCK_M - 1) // G + 1)
    stop = tl.where(first_row // G < nodes, stop, 0)
    lowest, clear, offset_t = 0, 0, t
    if WINDOW:
        if TREE:
            offset_t = tl.load(depth_ptr + t, valid, 0)
        nearest = tl.min(tl.where(valid, offset_t, size), 0)
        farthest = tl.max(tl.where(valid, offset_t, 0), 0)
        lowest = tl.maximum(prefix + nearest - window + 1, 0)
        clear = tl.maximum(prefix + farthest - window + BLOCK_N, 0) // BLOCK_N * BLOCK_N
    begin, end = lowest // BLOCK_N * BLOCK_N, stop
    if SPLIT:
        if EVEN:
            split_size = tl.cdiv(tl.maximum(stop - begin, 0), num_splits * BLOCK_N) * BLOCK_N
            begin += split * split_size
            end = tl.minimum(begin + split_size, stop)
        else:
            end = tl.minimum((split + 1) * split_size, stop)
            begin = tl.maximum(split * split_size, begin)

    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q_ptr += b * stride_qb + kv_head * G * stride_qh
    q_rows = t.to(tl.int64) * stride_qt + group * stride_qh
    asked = (valid & (begin < end))[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + q_rows[:, None] + d[None, :], asked, 0.0)
    if NEGATE:
        q = -q
    k_ptr += kv_head * stride_kh
    v_ptr += kv_head * stride_vh
    if PAGE == 0:
        k_ptr += b * stride_kb
        v_ptr += b * stride_vb
    m = tl.full((BLOCK_M,), -INF, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    tail = prefix // BLOCK_N * BLOCK_N  # steps before lie in the prefix
    for part in tl.static_range(3):
        # the window's lower edge, the prefix that all rows see, the tree
        start = begin if part == 0 else tl.maximum(begin, clear)
        upto = end
        if part == 0:
            upto = tl.minimum(end, clear)
        elif part == 1:
            upto = tl.minimum(end, tail)
        else:
            start = tl.maximum(start, tail)
        if part > 0 or WINDOW:
            for at in range(start, upto, BLOCK_N):
                m, total, acc = _attend(
                    q, m, total, acc, at, t, offset_t, prefix, nodes, lowest, stop, window,
                    mask_ptr, depth_ptr, stride_mt, mask_words, k_ptr, v_ptr, table_ptr, stride_kb,
                    stride_ks, stride_vb, stride_vs, scale, softcap, TREE, WINDOW, SOFTCAP, PAGE,
                    PRECISION, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, part != 1,
                )  # fmt: skip

    q_head = kv_head * G + group
    heads = tl.num_programs(1) * G
    if SPLIT:
        at = ((split * tl.num_programs(2) + b) * size + t) * heads + q_head
        tl.store(lse_ptr + at, m + tl.log2(total), valid)
        kept = valid & (total != 0)
    else:
        if SINKS:
            m, total, acc = _add_sink(m, total, acc, tl.load(sinks_ptr + q_head))
        at = (b * size + t) * heads + q_head
        kept = t < size
        lse = tl.where(valid, (m + tl.log2(total)) * LN2, -INF)
        tl.store(lse_ptr + (b * heads + q_head) * size + t, lse, kept)
        acc = tl.where(valid[:, None], acc, 0.0)
    result = (acc / tl.where(total == 0, 1.0, total)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] * DV + dv[None, :], result, kept[:, None] & (dv < DV)[None, :])


@triton.jit(do_not_specialize=["size", "num_splits"])
def _tree_attention_combine_kernel(
    part_ptr, part_lse_ptr, num_nodes_ptr, sinks_ptr, out_ptr, lse_ptr, size, num_splits,
    HEADS: tl.constexpr, DV: tl.constexpr, SINKS: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    rows, dv = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_DV)
    t, head = rows // HEADS, rows % HEADS
    inside = t < size
    valid = inside & (t < tl.load(num_nodes_ptr + b))
    at = b * size * HEADS + rows
    m = tl.full((ROWS,), -INF, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    for first in range(0, num_splits, SPLITS):
        split = (first + tl.arange(0, SPLITS)).to(tl.int64)
        part = (split * tl.num_programs(1) * size * HEADS)[:, None] + at[None, :]
        lse = tl.load(part_lse_ptr + part, (split < num_splits)[:, None] & valid[None, :], -INF)
        highest = tl.maximum(m, tl.max(lse, 0))
        shift = tl.where(highest == -INF, 0.0, highest)
        rescale, weights = tl.exp2(m - shift), tl.exp2(lse - shift[None, :])
        asked = (lse != -INF)[:, :, None] & (dv < DV)[None, None, :]
        values = tl.load(part_ptr + part[:, :, None] * DV + dv[None, None, :], asked, 0.0)
        acc = acc * rescale[:, None] + tl.sum(values * weights[:, :, None], 0)
        total = total * rescale + tl.sum(weights, 0)
        m = highest
    if SINKS:
        m, total, acc = _add_sink(m, total, acc, tl.load(sinks_ptr + head))
    lse = tl.where(valid, (m + tl.log2(total)) * LN2, -INF)
    tl.store(lse_ptr + (b * HEADS + head) * size + t, lse, inside)
    result = tl.where(valid[:, None], acc / tl.where(total == 0, 1.0, total)[:, None], 0.0)
    kept = inside[:, None] & (dv < DV)[None, :]
    tl.store(out_ptr + at[:, None] * DV + dv[None, :], result.to(out_ptr.dtype.element_ty), kept)
