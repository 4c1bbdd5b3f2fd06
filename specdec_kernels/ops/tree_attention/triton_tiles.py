"""How tree_attention is cut into blocks on a GPU: tile sizes, and splits of the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from specdec_kernels.ops._triton import Chip

MAX_SPLITS = 128  # that are picked; a fixed split_size may make more
LEAST_KEYS = 128  # per split, for the same reason
RESIDENT = 2  # blocks of these tiles that a multiprocessor holds at a time
FIXED_ROWS = 64  # per block under a fixed split size
LARGEST_HEAD = 256  # beyond, registers spill


class Tiles(NamedTuple):
    """block_m: rows (slot, query head of one K/V head) per block. block_n: keys per step, at most
    64: the ancestors of a row among them are one word."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def block_of(dim: int) -> int:
    """Tiles have powers of two as sizes, and a product takes at least 16."""
    return max(triton.next_power_of_2(dim), 16)


def choose_tiles(chip: Chip, dtype: torch.dtype, rows: int, dim: int, v_dim: int) -> Tiles:
    """Few enough rows and keys at a time that nothing spills: tests compile what this returns.

    Args:
        rows: slots times query heads, per K/V head. dim, v_dim: sizes of K's and V's heads.
    """
    wide, single = max(block_of(dim), block_of(v_dim)), dtype == torch.float32
    most_rows = 16 if single else 32 if chip.backend == "hip" or wide > 128 else 128
    block_m = min(block_of(rows), most_rows)
    roomy = chip.shared_memory >= 160_000 and not single
    block_n = 64 if roomy and block_m * wide <= 32 * 128 else 16 if single and wide > 128 else 32
    stage_bytes = block_n * (block_of(dim) + block_of(v_dim)) * dtype.itemsize
    num_stages = min(max(chip.shared_memory // (RESIDENT * stage_bytes), 1), 3)
    many = block_m * wide > 64 * 128 or (single and wide > 128)
    return Tiles(block_m, block_n, 8 if many else 4, num_stages)


def precision_of(chip: Chip, dim: int) -> str:
    """Of products of fp32: three tf32 products keep what one loses, in registers that the largest
    heads have not left."""
    return "tf32x3" if chip.backend == "cuda" and dim <= 192 else "ieee"


def choose_splits(
    chip: Chip, blocks: int, rows: int, slots: int, key_bytes: int, v_dim: int
) -> int:
    """Splits of each row's keys, given the blocks that there are without.

    As few as fill the last wave of blocks nearly as well as any other number. More than the cache
    has keys for, or than would write more partial results than the cache holds bytes, do not pay.

    Args:
        rows: packed rows per K/V head. slots: of the cache, per row of the batch.
        key_bytes: of one slot and K/V head, K and V.
    """
    room = RESIDENT * chip.multiprocessors
    most = min(MAX_SPLITS, slots // LEAST_KEYS, slots * key_bytes // (8 * rows * v_dim))
    if most <= 1 or blocks >= 0.8 * room:
        return 1

    def filled(splits: int) -> float:
        waves = blocks * splits / room
        return waves / -(-blocks * splits // room)

    best = max(map(filled, range(1, most + 1)))
    return next(s for s in range(1, most + 1) if filled(s) >= 0.85 * best)


class Plan(NamedTuple):
    """slots: of the cache, per row of the batch. row_blocks: blocks that share a K/V head's tiles.
    split_size: keys of a split, 0 for even splits of what each row has."""

    tiles: Tiles
    kv_heads: int
    slots: int
    row_blocks: int
    num_splits: int
    split_size: int


def make_plan(
    chip: Chip, q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None, split_size: int
) -> Plan:
    """From shapes alone. With a split size given, neither tiles nor splits depend on T or batch."""
    batch, size, heads, dim = q.shape
    v_dim = v.shape[-1]
    kv_heads, slots = k.shape[1], k.shape[2]
    if block_table is not None:
        kv_heads, slots = k.shape[2], block_table.shape[1] * k.shape[1]
    rows = size * heads // kv_heads
    if split_size:
        tiles = choose_tiles(chip, q.dtype, FIXED_ROWS, dim, v_dim)
        split_size = -(-split_size // 64) * 64
        num_splits = max(-(-slots // split_size), 1)
        return Plan(tiles, kv_heads, slots, -(-rows // tiles.block_m), num_splits, split_size)
    tiles = choose_tiles(chip, q.dtype, rows, dim, v_dim)
    row_blocks = -(-rows // tiles.block_m)
    key_bytes = (dim + v_dim) * q.element_size()
    num_splits = choose_splits(chip, batch * kv_heads * row_blocks, rows, slots, key_bytes, v_dim)
    return Plan(tiles, kv_heads, slots, row_blocks, num_splits, 0)
