"""The largest logit of every row, in one pass, and what a row decides by it alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.ops._triton import WARPS, launch
from specdec_kernels.ops._triton_logits import (
    BLOCK,
    Edits,
    Logits,
    Window,
    load_tile,
    nodes_of,
)
from specdec_kernels.ops._triton_numerics import pair_index, pair_key, pair_value
from specdec_kernels.tree import STATUS_EMPTY, STATUS_NAN

NAN = tl.constexpr(STATUS_NAN)
EMPTY = tl.constexpr(STATUS_EMPTY)
# Enough programs for any GPU: more make the reduction longer than the pass.
_PROGRAMS = 1024
# One lane each in the programs that merge them.
MOST_PIECES = tl.constexpr(128)


class Cuts(NamedTuple):
    """How rows are cut so that few of them fill a GPU: `pieces` of `tiles` tiles each.

    They change nothing in any result.
    """

    pieces: int
    tiles: int

    @staticmethod
    def of(logits: Logits) -> Cuts:
        wanted = triton.cdiv(_PROGRAMS, max(logits.rows, 1))
        tiles = triton.cdiv(logits.tiles, min(wanted, logits.tiles, MOST_PIECES.value))
        return Cuts(triton.cdiv(logits.tiles, tiles), tiles)


class Filters(NamedTuple):
    """temperature, top_k, top_p, min_p [B]; the last three None for a draft's rows."""

    temperature: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None


class Extremes(NamedTuple):
    """Of each row's pieces: keys int64 [rows, cuts], the best pair key of value and id, NaN left
    out; nan int32 [rows, cuts]. maxima: the largest logit of every tile, fp32 [rows, tiles]."""

    keys: Tensor
    nan: Tensor
    maxima: Tensor | None


def find_extremes(
    logits: Logits,
    edits: Edits,
    window: Window,
    cuts: Cuts,
    filters: Filters | None = None,
    bins: Tensor | None = None,
    keeps_maxima: bool = True,
) -> Extremes:
    """Reads every row of a node once, V elements, and writes 12 bytes per piece and 4 per tile.

    bins: int64 [rows, ...], set to 0 for rows with top_k or top_p.
    """
    like, rows = logits.data, logits.rows
    result = Extremes(
        like.new_empty((rows, cuts.pieces), dtype=torch.int64),
        like.new_empty((rows, cuts.pieces), dtype=torch.int32),
        like.new_empty((rows, logits.tiles), dtype=torch.float32) if keeps_maxima else None,
    )
    arguments = (logits, edits, window, cuts, filters, bins, result)
    size = 0 if bins is None else bins[0].numel() if rows else 0
    launch(_extremes_kernel, (rows * cuts.pieces,), like, *arguments, BINS=size, num_warps=WARPS)
    return result


@triton.jit
def row_of_program(pieces, width):
    """Row, piece, batch row (int64) and slot of this program."""
    program = tl.program_id(0)
    row = program // pieces
    return row, program % pieces, (row // width).to(tl.int64), row % width


@triton.jit
def ranks(filters, b, vocab):
    """Whether a row has top_k, and top_p."""
    top_k = tl.load(filters.top_k + b)
    return (top_k > 0) & (top_k < vocab), tl.load(filters.top_p + b) < 1.0


@triton.jit
def _extremes_kernel(logits, edits, window, cuts, filters, bins_ptr, extremes, BINS: tl.constexpr):
    row, piece, b, slot = row_of_program(cuts.pieces, logits.width)
    if slot >= nodes_of(window, logits.width, b):
        return
    tiles = tl.cdiv(logits.vocab, BLOCK)
    begin = piece * cuts.tiles
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_tile = tl.zeros([BLOCK], tl.int32) + begin
    nan = tl.zeros([BLOCK], tl.int1)
    for tile in range(begin, tl.minimum(begin + cuts.tiles, tiles)):
        _, x = load_tile(logits, edits, window, b, slot, tile)
        is_nan = x != x
        nan |= is_nan
        x = tl.where(is_nan, float("-inf"), x)
        better = x > best
        best = tl.where(better, x, best)
        best_tile = tl.where(better, tile, best_tile)
        if extremes.maxima is not None:
            tl.store(extremes.maxima + row.to(tl.int64) * tiles + tile, tl.max(x, 0))
    key = pair_key(best, best_tile * BLOCK + tl.arange(0, BLOCK))
    at = row.to(tl.int64) * cuts.pieces + piece
    tl.store(extremes.keys + at, tl.max(key, 0))
    tl.store(extremes.nan + at, tl.max(nan.to(tl.int32), 0))
    if bins_ptr is not None:
        counts, weighs = ranks(filters, b, logits.vocab)
        if counts | weighs:
            bins = bins_ptr + row.to(tl.int64) * BINS
            for first in range(piece * BLOCK, BINS, cuts.pieces * BLOCK):
                tl.store(bins + first + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.int64))


@triton.jit
def best_key(keys_ptr, row, cuts):
    lane = tl.arange(0, MOST_PIECES)
    at = row.to(tl.int64) * cuts.pieces + lane
    return tl.max(tl.load(keys_ptr + at, mask=lane < cuts.pieces, other=-(2**63)), 0)


@triton.jit
def _largest_finite(logits, edits, window, b, slot):
    """The lowest id of the largest finite logit, or 0."""
    best = pair_key(tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32))
    for tile in range(tl.cdiv(logits.vocab, BLOCK)):
        offs, x = load_tile(logits, edits, window, b, slot, tile)
        key = pair_key(x, offs)
        best = tl.where(tl.abs(x) < float("inf"), tl.maximum(best, key), best)
    return pair_index(tl.max(best, 0))


@triton.jit
def greedy_token(logits, edits, window, cuts, extremes, row, b, slot):
    """Token at temperature 0, status and the largest logit. The row is read again only when it
    holds both NaN and infinity."""
    key = best_key(extremes.keys, row, cuts)
    largest = pair_value(key)
    token = pair_index(key)
    lane = tl.arange(0, MOST_PIECES)
    at = row.to(tl.int64) * cuts.pieces + lane
    has_nan = tl.max(tl.load(extremes.nan + at, mask=lane < cuts.pieces, other=0), 0) > 0
    if has_nan & (largest == float("inf")):
        token = _largest_finite(logits, edits, window, b, slot)
    status = tl.where(has_nan, NAN, tl.where(largest == float("-inf"), EMPTY, 0))
    return token, status, largest
