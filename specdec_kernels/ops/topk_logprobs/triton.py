"""topk_logprobs in Triton: a pass for the largest logits, a pass for the sum, and the best of the
few tiles that can hold them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.ops._triton import WARPS, launch
from specdec_kernels.ops._triton_extremes import (
    MOST_PIECES,
    Cuts,
    best_key,
    find_extremes,
    row_of_program,
)
from specdec_kernels.ops._triton_logits import BLOCK, Edits, Logits, Window, centre
from specdec_kernels.ops._triton_numerics import (
    LARGEST_VOCABULARY,
    LOWEST_FLOAT,
    NEGLIGIBLE,
    exp,
    log,
    mass_as_float,
    pair_index,
    pair_key,
    pair_value,
    to_mass,
)


def topk_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three launches. Reads the logits twice, and for each of the k best its tile once more."""
    rows = Logits.of(logits.unsqueeze(1))
    if rows.vocab > LARGEST_VOCABULARY:
        raise ValueError(
            f"expected a vocabulary of at most {LARGEST_VOCABULARY} tokens, got {rows.vocab}"
        )
    cuts = Cuts.of(rows)
    extremes = find_extremes(rows, Edits(), Window(), cuts)
    masses = logits.new_empty((rows.rows, cuts.pieces), dtype=torch.int64)
    logprobs = logits.new_empty((rows.rows, k), dtype=torch.float32)
    token_ids = logits.new_empty((rows.rows, k), dtype=torch.int64)
    lse = logits.new_empty(rows.rows, dtype=torch.float32)
    grid = (rows.rows * cuts.pieces,)
    launch(_sums_kernel, grid, logits, rows, cuts, extremes, masses, num_warps=WARPS)
    outputs = (logprobs, token_ids, lse)
    tiles = dict(TILES=triton.next_power_of_2(rows.tiles))
    launch(
        _best_kernel,
        (rows.rows,),
        logits,
        rows,
        cuts,
        extremes,
        masses,
        *outputs,
        k,
        **tiles,
        num_warps=WARPS,
    )
    return outputs


@triton.jit
def _load(logits, b, tile):
    """Tokens and logits of a tile; NaN counts as -infinity."""
    offs = tile * BLOCK + tl.arange(0, BLOCK)
    at = logits.data + b * logits.stride_b + offs
    x = tl.load(at, mask=offs < logits.vocab, other=float("-inf")).to(tl.float32)
    return offs, tl.where(x != x, float("-inf"), x)


@triton.jit
def _sums_kernel(logits, cuts, extremes, masses_ptr):
    """The mass of exp(logit - largest) of every piece."""
    row, piece, b, _slot = row_of_program(cuts.pieces, logits.width)
    largest = pair_value(best_key(extremes.keys, row, cuts))
    begin = piece * cuts.tiles
    tiles = tl.cdiv(logits.vocab, BLOCK)
    mass = tl.zeros([BLOCK], tl.int64)
    if largest > float("-inf"):
        for tile in range(begin, tl.minimum(begin + cuts.tiles, tiles)):
            bound = tl.load(extremes.maxima + b * tiles + tile)
            if centre(bound, 1.0, largest) >= NEGLIGIBLE:
                _offs, x = _load(logits, b, tile)
                values = centre(x, 1.0, largest)
                mass += tl.where(values >= LOWEST_FLOAT, to_mass(exp(values)), 0)
    tl.store(masses_ptr + b * cuts.pieces + piece, tl.sum(mass, 0))


@triton.jit
def _best_of_tile(logits, b, tile, last):
    """The best pair key of a tile below the key `last`; keys above it are taken already."""
    offs, x = _load(logits, b, tile)
    key = pair_key(x, offs)
    return tl.max(tl.where((key < last) & (x > float("-inf")), key, -(2**63)), 0)


@triton.jit
def _log_sum(cuts, masses_ptr, b):
    lane = tl.arange(0, MOST_PIECES)
    parts = tl.load(masses_ptr + b * cuts.pieces + lane, mask=lane < cuts.pieces, other=0)
    return log(mass_as_float(tl.sum(parts, 0)))


@triton.jit
def _best_kernel(
    logits, cuts, extremes, masses_ptr, logprobs_ptr, ids_ptr, lse_ptr, k, TILES: tl.constexpr
):
    """The best key of every tile stands in a register; each of the k steps takes the best of them
    and looks for the next in its tile."""
    b = tl.program_id(0).to(tl.int64)
    largest = pair_value(best_key(extremes.keys, b, cuts))
    log_sum = tl.where(largest > float("-inf"), _log_sum(cuts, masses_ptr, b), 0.0)
    tl.store(lse_ptr + b, largest + log_sum)
    tiles = tl.cdiv(logits.vocab, BLOCK)
    lane = tl.arange(0, TILES)
    maxima = tl.load(extremes.maxima + b * tiles + lane, mask=lane < tiles, other=float("-inf"))
    # The best of a tile that has not been looked at: better than any key of its value.
    best = pair_key(maxima, lane * 0)
    looked_at = maxima == float("-inf")
    best = tl.where(looked_at, -(2**63), best)
    place = k * 0
    while place < k:
        key = tl.max(best, 0)
        tile = tl.min(tl.where(best == key, lane, TILES), 0)
        known = tl.max(tl.where((lane == tile) & looked_at, 1, 0), 0)
        ended = key == -(2**63)
        if ended:
            tl.store(logprobs_ptr + b * k + place, float("-inf"))
            tl.store(ids_ptr + b * k + place, -1)
            place += 1
        else:
            below = key
            if known == 0:
                below = key * 0 + (2**63 - 1)
            else:
                logprob = centre(pair_value(key), 1.0, largest) - log_sum
                tl.store(logprobs_ptr + b * k + place, logprob)
                id = tl.where(logprob > float("-inf"), pair_index(key), -1)
                tl.store(ids_ptr + b * k + place, id)
                place += 1
            following = _best_of_tile(logits, b, tile, below)
            best = tl.where(lane == tile, following, best)
            looked_at |= lane == tile
