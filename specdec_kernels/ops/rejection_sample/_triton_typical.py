"""The rule `typical` in Triton, lossy: a token stands when p > min(threshold, alpha exp(-entropy of
p)), and the deepest node that stands is kept."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec_kernels.ops._triton import WARPS, launch
from specdec_kernels.ops._triton_batch import largest_of_tile, values_of_tile
from specdec_kernels.ops._triton_extremes import row_of_program
from specdec_kernels.ops._triton_logits import BLOCK, nodes_of
from specdec_kernels.ops._triton_numerics import exp, log, mass_as_float, to_mass
from specdec_kernels.ops._triton_walk import append, next_child
from specdec_kernels.ops.rejection_sample._triton_case import (
    FROM_TARGET,
    KNOWN,
    Case,
    Ends,
    is_parent,
    sum_of_pieces,
    target_of,
    total_of,
    window_width,
    write_end,
)
from specdec_kernels.tree import Acceptance


def walk_typical(case: Case, acceptance: Acceptance, threshold: float, alpha: float) -> Ends:
    """Two launches. Reads the rows of nodes with children once more."""
    target, like = case.target, case.target.logits.data
    rows, pieces, width = target.logits.rows, target.cuts.pieces, window_width(target)
    spreads = like.new_empty((rows, pieces), dtype=torch.int64)
    ends = Ends.new(like.shape[0], like)
    launch(_spreads_kernel, (rows * pieces,), like, case, spreads, WIDTH=width, num_warps=WARPS)
    launch(
        _walk_typical_kernel,
        (like.shape[0],),
        like,
        case,
        acceptance,
        ends,
        spreads,
        threshold,
        alpha,
        WIDTH=width,
        num_warps=1,
    )
    return ends


@triton.jit
def _spreads_kernel(case, spreads_ptr, WIDTH: tl.constexpr):
    """The mass of -value exp(value) over the kept values."""
    target = case.target
    row, piece, b, slot = row_of_program(target.cuts.pieces, target.logits.width)
    if is_parent(target, b, slot, WIDTH):
        temperature = tl.load(target.filters.temperature + b)
        largest = tl.load(target.rows.largest + row)
        threshold = tl.load(target.rows.thresholds + row)
        sums = tl.zeros([BLOCK], tl.int64)
        if tl.load(target.rows.tokens + row) < 0:
            begin = piece * target.cuts.tiles
            end = tl.minimum(begin + target.cuts.tiles, tl.cdiv(target.logits.vocab, BLOCK))
            for tile in range(begin, end):
                if largest_of_tile(target, row, tile, temperature, largest) >= threshold:
                    _, values = values_of_tile(target, b, slot, tile, temperature, largest)
                    spread = to_mass(exp(values) * -values)
                    sums += tl.where(values >= threshold, spread, 0)
        tl.store(spreads_ptr + row.to(tl.int64) * target.cuts.pieces + piece, tl.sum(sums, 0))


@triton.jit
def _bound(case, spreads_ptr, row, decided, total, threshold, alpha):
    entropy = tl.zeros_like(total)
    if decided < 0:
        spread = mass_as_float(sum_of_pieces(spreads_ptr, row, case.target.cuts))
        entropy = log(total) + tl.div_rn(spread, total)
    return tl.minimum(alpha * exp(-entropy), threshold)


@triton.jit
def _depths(case, spreads_ptr, b, nodes, threshold, alpha, WIDTH: tl.constexpr):
    """Levels below the root of every slot that stands, -1 for the others."""
    target = case.target
    window, width = target.window, target.logits.width
    at = tl.arange(0, WIDTH)
    depths = tl.where((at == 0) & (nodes > 0), 0, -1)
    slot = nodes * 0
    while slot < nodes:
        depth = tl.sum(tl.where(at == slot, depths, 0), 0)
        child = next_child(window, width, b, nodes, slot, slot, WIDTH)
        if (depth >= 0) & (child >= 0):
            row = b * width + slot
            total = total_of(target, case.masses, row)
            decided = tl.load(target.rows.tokens + row)
            lowest = _bound(case, spreads_ptr, row, decided, total, threshold, alpha)
            while child >= 0:
                token = tl.load(window.tokens + b * width + child)
                inside = (token >= 0) & (token < target.logits.vocab)
                stands = inside & (target_of(case, row, b, slot, token, total) > lowest)
                depths = tl.where((at == child) & stands, depth + 1, depths)
                child = next_child(window, width, b, nodes, slot, child, WIDTH)
        slot += 1
    return depths


@triton.jit
def _walk_typical_kernel(
    case, acceptance, ends, spreads_ptr, threshold, alpha, WIDTH: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    target = case.target
    window, width = target.window, target.logits.width
    nodes = nodes_of(window, width, b)
    depths = _depths(case, spreads_ptr, b, nodes, threshold, alpha, WIDTH)
    at = tl.arange(0, WIDTH)
    deepest = tl.max(depths, 0)
    best = tl.min(tl.where(depths == deepest, at, WIDTH), 0)
    slot = tl.where(deepest >= 0, best, -1)
    status = deepest * 0
    way = deepest * 0 + KNOWN
    level = deepest
    token = tl.zeros([], tl.int64)
    if deepest >= 0:
        token = tl.load(target.rows.tokens + b * width + best)
        way = tl.where(token < 0, FROM_TARGET, KNOWN)
    while level >= 0:
        status |= tl.load(target.rows.status + b * width + slot)
        append(acceptance, width, b, level, slot, token)
        token = tl.load(window.tokens + b * width + slot)
        slot = tl.load(window.parents + b * width + slot)
        level -= 1
    tl.store(acceptance.status + b, status)
    position = tl.load(case.position + b) + deepest
    last = tl.where(deepest >= 0, best, -1)
    write_end(ends, b, last, way, position, 0, 1.0, deepest + 1)
