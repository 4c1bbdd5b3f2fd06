"""tree_attention in Triton: split over the cache, then combined."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from specdec_kernels.ops._triton import chip_of, launch, launch_large
from specdec_kernels.ops.tree_attention.triton_kernels import (
    _tree_attention_combine_kernel,
    _tree_attention_kernel,
)
from specdec_kernels.ops.tree_attention.triton_tiles import (
    LARGEST_HEAD,
    block_of,
    make_plan,
    precision_of,
)

ROWS_COMBINED, SPLITS_COMBINED = 8, 4  # per block, and per step of it
LOG2_E = 1 / math.log(2)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_len: Tensor,
    num_nodes: Tensor,
    tree_mask: Tensor | None = None,
    depth: Tensor | None = None,
    sinks: Tensor | None = None,
    block_table: Tensor | None = None,
    scale: float = 1.0,
    window: int | None = None,
    softcap: float | None = None,
    split_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """One launch, or two where the cache is split: the grid depends on sizes and the chip alone.

    Moves the K and V that are seen, once for every block of rows (slots times heads that share
    them; 64 or so), and q and out. Split into s parts also 2 s (Dv + 1) x 4 bytes for each slot and
    query head: less than the cache holds where the split is picked.
    """
    batch, size, heads, dim = q.shape
    if (widest := max(dim, v.shape[-1])) > LARGEST_HEAD:
        raise ValueError(
            f"tree_attention: expected D and Dv of at most {LARGEST_HEAD}, got {widest}"
        )
    out = q.new_empty((batch, size, heads, v.shape[-1]))
    lse = q.new_empty((batch, heads, size), dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    chip = chip_of(q)
    plan = make_plan(chip, q, k, v, block_table, split_size)
    parts, part_lse = out, lse
    if plan.num_splits > 1:
        part_lse = lse.new_empty((plan.num_splits, batch, size, heads))
        parts = lse.new_empty((*part_lse.shape, v.shape[-1]))
    num_nodes = num_nodes.contiguous()
    sink_logits = lse if sinks is None else sinks.contiguous()
    words = lse if tree_mask is None else _dense_rows(tree_mask)
    offsets = lse if depth is None else _dense_rows(depth)
    table = lse if block_table is None else _dense_rows(block_table)
    # softcap * tanh(x * scale / softcap); what is visible must differ from -inf * 0
    factor = (abs(scale) or 1e-30) / softcap if softcap else (abs(scale) or 1e-30) * LOG2_E
    launch_large(
        _tree_attention_kernel,
        (plan.num_splits * plan.row_blocks, plan.kv_heads, batch),
        q,
        q,
        k,
        v,
        prefix_len.contiguous(),
        num_nodes,
        words,
        offsets,
        sink_logits,
        table,
        parts,
        part_lse,
        *q.stride()[:3],
        *_head_last(k, block_table),
        *_head_last(v, block_table),
        words.stride(0) if words.shape[0] > 1 else 0,
        words.stride(1),
        offsets.stride(0),
        table.stride(0),
        size,
        plan.slots,
        plan.num_splits,
        plan.split_size,
        min(window or 0, 2**30),
        words.shape[-1],
        factor,
        softcap * LOG2_E if softcap else 0.0,
        G=heads // plan.kv_heads,
        D=dim,
        DV=v.shape[-1],
        PAGE=0 if block_table is None else k.shape[1],
        TREE=tree_mask is not None,
        WINDOW=window is not None,
        SOFTCAP=bool(softcap),
        SINKS=sinks is not None,
        NEGATE=scale < 0,
        SPLIT=plan.num_splits > 1,
        EVEN=split_size == 0,
        PRECISION=precision_of(chip, max(dim, v.shape[-1])),
        BLOCK_M=plan.tiles.block_m,
        BLOCK_N=plan.tiles.block_n,
        BLOCK_D=block_of(dim),
        BLOCK_DV=block_of(v.shape[-1]),
        num_warps=plan.tiles.num_warps,
        num_stages=plan.tiles.num_stages,
    )
    if plan.num_splits > 1:
        launch(
            _tree_attention_combine_kernel,
            (triton.cdiv(size * heads, ROWS_COMBINED), batch),
            q,
            parts,
            part_lse,
            num_nodes,
            sink_logits,
            out,
            lse,
            size,
            plan.num_splits,
            HEADS=heads,
            DV=v.shape[-1],
            SINKS=sinks is not None,
            ROWS=ROWS_COMBINED,
            SPLITS=SPLITS_COMBINED,
            BLOCK_DV=block_of(v.shape[-1]),
            num_warps=4,
        )
    return out, lse


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _head_last(cache: Tensor, block_table: Tensor | None) -> tuple[int, int, int]:
    """Steps of a cache from row (or page) to row, from head to head and from slot to slot."""
    first, second, third, _ = cache.stride()
    return (first, second, third) if block_table is None else (first, third, second)
