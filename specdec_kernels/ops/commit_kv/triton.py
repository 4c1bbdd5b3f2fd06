"""commit_kv_ in Triton: all layers in one launch."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.ops._triton import launch
from specdec_kernels.ops.commit_kv.table import device_table

TILE_WORDS = 512  # of a row of K or V that one block moves
ROWS_IN_FLIGHT = 4  # loads that are under way together: one load has no latency to hide in


@triton.jit
def _slot_offsets(
    slots, table_ptr, b, size_1, stride_0, stride_1, stride_2, mask, PAGED: tl.constexpr
):
    """Where slots of row `b` begin, in elements, and the step from head to head."""
    if PAGED:
        page = tl.load(table_ptr + slots // size_1, mask, 0).to(tl.int64)
        return page * stride_0 + slots % size_1 * stride_1, stride_2
    else:
        return b.to(tl.int64) * stride_0 + slots * stride_2, stride_1


@triton.jit
def _commit_kv_kernel(
    caches_ptr, num_caches, path_ptr, stride_path, num_kept_ptr, prefix_len_ptr,
    block_table_ptr, stride_table, batch,
    ITEM_BYTES: tl.constexpr, WORD_BYTES: tl.constexpr, VECTOR: tl.constexpr, PAGED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    cache, b = tl.program_id(0) // batch, tl.program_id(0) % batch
    kept = tl.load(num_kept_ptr + b)
    prefix = tl.load(prefix_len_ptr + b).to(tl.int64)
    path_ptr += b.to(tl.int64) * stride_path
    block_table_ptr += b.to(tl.int64) * stride_table

    shape_ptr = caches_ptr + num_caches + 4 * cache
    stride_ptr = caches_ptr + 5 * num_caches + 4 * cache
    size_1, stride_0 = tl.load(shape_ptr + 1), tl.load(stride_ptr)
    stride_1, stride_2 = tl.load(stride_ptr + 1), tl.load(stride_ptr + 2)
    num_heads = tl.load(shape_ptr + 2) if PAGED else size_1
    word = tl.int16 if WORD_BYTES == 2 else tl.int32
    base = tl.load(caches_ptr + cache).to(tl.pointer_type(word))
    base = tl.multiple_of(base, WORD_BYTES * VECTOR)
    row_words = tl.multiple_of(tl.load(shape_ptr + 3) * ITEM_BYTES // WORD_BYTES, VECTOR)

    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :, None]
    words = tl.arange(0, BLOCK_W)[None, None, :]
    inside = (heads < num_heads) & (words < row_words)
    # Rows are read from path[i] > i, and all that has been written by then lies before i. Within
    # a group the barrier keeps writes behind the reads of other threads.
    for first in range(0, kept, ROWS):
        i = first + tl.arange(0, ROWS)
        source = tl.load(path_ptr + i, i < kept, 0)
        moves = source > i
        at, stride_h = _slot_offsets(
            prefix + source, block_table_ptr, b, size_1, stride_0, stride_1, stride_2, moves, PAGED
        )
        to, _ = _slot_offsets(
            prefix + i, block_table_ptr, b, size_1, stride_0, stride_1, stride_2, moves, PAGED
        )
        in_words = heads * tl.multiple_of(stride_h * ITEM_BYTES // WORD_BYTES, VECTOR) + words
        mask = moves[:, None, None] & inside
        at = tl.multiple_of(at * ITEM_BYTES // WORD_BYTES, VECTOR)[:, None, None]
        to = tl.multiple_of(to * ITEM_BYTES // WORD_BYTES, VECTOR)[:, None, None]
        held = tl.load(base + at + in_words, mask)
        tl.debug_barrier()
        tl.store(base + to + in_words, held, mask)


def commit_kv(
    k: list[Tensor],
    v: list[Tensor],
    path: Tensor,
    num_kept: Tensor,
    prefix_len: Tensor,
    block_table: Tensor | None = None,
) -> None:
    """One launch. Moves 2 x item size x heads x D bytes per layer, K and V, and row whose slot
    changes; a row that stays costs its entry of `path`.

    A graph can be captured after one call with the same caches: the first builds their table.
    """
    path = path if path.stride(1) == 1 else path.contiguous()
    caches = [*k, *v]
    item_bytes = k[0].element_size()
    # the largest power of two that divides every address and step, up to a 16-byte load
    steps = [x.data_ptr() for x in caches]
    steps += [n * item_bytes for x in caches for n in (*x.stride()[:3], x.shape[3])]
    alignment = math.gcd(16, *steps)
    word_bytes = min(alignment, 4)
    heads = max(x.shape[2 if block_table is not None else 1] for x in caches)
    block_w = triton.next_power_of_2(max(item_bytes * x.shape[3] // word_bytes for x in caches))
    block_h = min(triton.next_power_of_2(heads), max(TILE_WORDS // block_w, 1))
    pages = path if block_table is None else block_table
    launch(
        _commit_kv_kernel,
        (len(caches) * path.shape[0], triton.cdiv(heads, block_h)),
        path,
        device_table(path.device, caches),
        len(caches),
        path,
        path.stride(0),
        num_kept.contiguous(),
        prefix_len.contiguous(),
        pages,
        pages.stride(0),
        path.shape[0],
        ITEM_BYTES=item_bytes,
        WORD_BYTES=word_bytes,
        VECTOR=alignment // word_bytes,
        PAGED=block_table is not None,
        ROWS=ROWS_IN_FLIGHT,
        BLOCK_H=block_h,
        BLOCK_W=block_w,
        num_warps=4,
    )
