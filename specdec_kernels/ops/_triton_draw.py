"""Draws by argmax of score + Gumbel noise, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.ops._triton import launch_large
from specdec_kernels.ops._triton_batch import Batch, largest_of_tile, values_of_tile
from specdec_kernels.ops._triton_extremes import row_of_program
from specdec_kernels.ops._triton_logits import BLOCK, depth_of, nodes_of
from specdec_kernels.ops._triton_numerics import pair_key
from specdec_kernels.ops._triton_random import LARGEST_GUMBEL, gumbel, may_beat, uniforms


def draw(batch: Batch, seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """Pair keys of each row's pieces, int64 [rows, cuts], of score and token drawn from the kept
    values; nothing for decided rows. One launch; reads the tiles that could hold the best once
    more."""
    rows, pieces = batch.logits.rows, batch.cuts.pieces
    keys = batch.logits.data.new_empty((rows, pieces), dtype=torch.int64)
    launch_large(
        _draw_kernel,
        (rows * pieces,),
        keys,
        batch,
        seed.contiguous(),
        position.contiguous(),
        keys,
        STREAM=stream,
    )
    return keys


@triton.jit
def better(scores, seed, position, stream, offs, first, best, best_token):
    """The best of tokens offs, BLOCK consecutive ones from `first` on, and of what was best before
    them. Logarithms are only taken where some token could be better."""
    u = uniforms(seed, position, stream, first, BLOCK)
    candidates = may_beat(scores, u, best) & (scores > float("-inf"))
    if tl.max(candidates.to(tl.int32), 0) > 0:
        total = tl.where(candidates, scores + gumbel(u), float("-inf"))
        highest = tl.max(total, 0)
        token = tl.min(tl.where(total == highest, offs, 2147483647), 0)
        best_token = tl.where(highest > best, token, best_token)
        best = tl.maximum(best, highest)
    return best, best_token


@triton.jit
def _draw_kernel(batch, seed_ptr, position_ptr, keys_ptr, STREAM: tl.constexpr):
    logits = batch.logits
    row, piece, b, slot = row_of_program(batch.cuts.pieces, logits.width)
    if slot >= nodes_of(batch.window, logits.width, b):
        return
    if tl.load(batch.rows.tokens + row) >= 0:
        return
    seed = tl.load(seed_ptr + b)
    position = tl.load(position_ptr + b) + depth_of(batch.window, logits.width, b, slot)
    temperature = tl.load(batch.filters.temperature + b)
    largest = tl.load(batch.rows.largest + row)
    threshold = tl.load(batch.rows.thresholds + row)
    begin = piece * batch.cuts.tiles
    end = tl.minimum(begin + batch.cuts.tiles, tl.cdiv(logits.vocab, BLOCK))
    best = tl.zeros_like(largest) + float("-inf")
    token = tl.zeros_like(slot)
    for tile in range(begin, end):
        bound = largest_of_tile(batch, row, tile, temperature, largest)
        if (bound >= threshold) & (bound + LARGEST_GUMBEL > best):
            offs, values = values_of_tile(batch, b, slot, tile, temperature, largest)
            scores = tl.where(values >= threshold, values, float("-inf"))
            best, token = better(scores, seed, position, STREAM, offs, tile * BLOCK, best, token)
    tl.store(keys_ptr + row.to(tl.int64) * batch.cuts.pieces + piece, pair_key(best, token))
