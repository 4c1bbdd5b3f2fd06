"""The last token of every batch row, in Triton: drawn by all programs, written by one per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.ops._triton import launch_large
from specdec_kernels.ops._triton_batch import largest_of_tile, values_of_tile
from specdec_kernels.ops._triton_draw import better
from specdec_kernels.ops._triton_extremes import best_key
from specdec_kernels.ops._triton_logits import BLOCK, nodes_of
from specdec_kernels.ops._triton_numerics import log, pair_index, pair_key, pair_value
from specdec_kernels.ops._triton_random import BONUS, LARGEST_GUMBEL, RESIDUAL
from specdec_kernels.ops._triton_walk import finish_row, next_child
from specdec_kernels.ops.rejection_sample._triton_case import (
    FROM_RESIDUAL,
    FROM_REST,
    FROM_TARGET,
    KNOWN,
    Case,
    Ends,
    draft_tile,
    target_tile,
    total_of,
    window_width,
)
from specdec_kernels.ops.rejection_sample._triton_recursive import left_of_siblings
from specdec_kernels.tree import Acceptance


def emit(
    case: Case, ends: Ends, sums: Tensor | None, acceptance: Acceptance, is_block: bool
) -> None:
    """Two launches. Reads the last row of each batch row once, and its draft row where a draft was
    rejected. sums: of rejected siblings, from walk_recursive."""
    like, pieces = case.target.logits.data, case.target.cuts.pieces
    batch, width = like.shape[0], window_width(case.target)
    keys = like.new_empty((batch, pieces), dtype=torch.int64)
    kind = dict(DRAFT=case.draft is not None, BLOCK_RULE=is_block, WIDTH=width)
    launch_large(_draw_end_kernel, (batch * pieces,), like, case, ends, sums, keys, **kind)
    launch_large(_emit_kernel, (batch,), like, case, ends, keys, acceptance, WIDTH=width)


@triton.jit
def without_siblings(window, width, b, slot, nodes, offs, scores, WIDTH: tl.constexpr):
    child = next_child(window, width, b, nodes, slot, slot, WIDTH)
    while child >= 0:
        token = tl.load(window.tokens + b * width + child)
        scores = tl.where(offs == token, float("-inf"), scores)
        child = next_child(window, width, b, nodes, slot, child, WIDTH)
    return scores


@triton.jit
def block_residual(case, b, slot, row, offs, target, weight, draft_total, DRAFT: tl.constexpr):
    """max(w p - q, 0) of tokens offs, q that of the slot's one child."""
    if DRAFT:
        draft = draft_tile(case, row, b, slot, offs, draft_total)
    else:
        at = case.target.window.tokens + b * case.target.logits.width + slot + 1
        draft = tl.where(offs == tl.load(at), 1.0, 0.0)
    left = weight * target - draft
    return tl.where(left > 0.0, left, 0.0)


@triton.jit
def _scores_of_tile(
    case, ends, sums_ptr, row, b, slot, nodes, tile, way, temperature, largest, threshold,
    DRAFT: tl.constexpr, BLOCK_RULE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Tokens of a tile and the logarithms of what they are drawn in proportion to."""
    target = case.target
    offs, values = values_of_tile(target, b, slot, tile, temperature, largest)
    scores = tl.where(values >= threshold, values, float("-inf"))
    if way == FROM_REST:
        window, width = target.window, target.logits.width
        scores = without_siblings(window, width, b, slot, nodes, offs, scores, WIDTH)
    if DRAFT or BLOCK_RULE:  # noqa: SIM102  decided at compile time
        if way == FROM_RESIDUAL:
            total = total_of(target, case.masses, row)
            draft_total = total
            if DRAFT:
                draft_total = total_of(case.draft, case.draft_masses, row)
            _, p = target_tile(case, row, b, slot, tile, -1, temperature, largest, threshold, total)
            if BLOCK_RULE:
                weight = tl.load(ends.weight + b)
                p = block_residual(case, b, slot, row, offs, p, weight, draft_total, DRAFT)
            else:
                q = draft_tile(case, row, b, slot, offs, draft_total)
                count = tl.load(ends.rejections + b)
                p, q = left_of_siblings(case, sums_ptr, b, slot, nodes, offs, p, q, count, WIDTH)
            scores = log(p)
    return offs, scores


@triton.jit
def _draw_end_kernel(
    case, ends, sums_ptr, keys_ptr,
    DRAFT: tl.constexpr, BLOCK_RULE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    target = case.target
    pieces = target.cuts.pieces
    b = (tl.program_id(0) // pieces).to(tl.int64)
    piece = tl.program_id(0) % pieces
    slot = tl.load(ends.slot + b)
    way = tl.load(ends.way + b)
    if (slot < 0) | (way == KNOWN):
        return
    width = target.logits.width
    row = b * width + slot
    nodes = nodes_of(target.window, width, b)
    seed = tl.load(case.seed + b)
    counter = tl.load(ends.counter + b)
    stream = tl.where(way == FROM_TARGET, BONUS, RESIDUAL)
    temperature = tl.load(target.filters.temperature + b)
    largest = tl.load(target.rows.largest + row)
    threshold = tl.load(target.rows.thresholds + row)
    begin = piece * target.cuts.tiles
    end = tl.minimum(begin + target.cuts.tiles, tl.cdiv(target.logits.vocab, BLOCK))
    best = tl.zeros_like(largest) + float("-inf")
    token = tl.zeros_like(slot)
    for tile in range(begin, end):
        bound = largest_of_tile(target, row, tile, temperature, largest)
        # a residual's scores have another scale
        if (bound >= threshold) & ((way == FROM_RESIDUAL) | (bound + LARGEST_GUMBEL > best)):
            offs, scores = _scores_of_tile(
                case, ends, sums_ptr, row, b, slot, nodes, tile, way, temperature, largest,
                threshold, DRAFT, BLOCK_RULE, WIDTH,
            )  # fmt: skip
            best, token = better(scores, seed, counter, stream, offs, tile * BLOCK, best, token)
    tl.store(keys_ptr + b * pieces + piece, pair_key(best, token))


@triton.jit
def _draw_from_target(case, row, b, slot, seed, counter):
    """What is drawn when nothing is left: from the target, with the noise of the residual."""
    target = case.target
    temperature = tl.load(target.filters.temperature + b)
    largest = tl.load(target.rows.largest + row)
    threshold = tl.load(target.rows.thresholds + row)
    best = tl.zeros_like(largest) + float("-inf")
    token = tl.zeros_like(slot)
    for tile in range(tl.cdiv(target.logits.vocab, BLOCK)):
        offs, values = values_of_tile(target, b, slot, tile, temperature, largest)
        scores = tl.where(values >= threshold, values, float("-inf"))
        best, token = better(scores, seed, counter, RESIDUAL, offs, tile * BLOCK, best, token)
    return token


@triton.jit
def _emit_kernel(case, ends, keys_ptr, acceptance, WIDTH: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    width = case.target.logits.width
    slot = tl.load(ends.slot + b)
    length = tl.load(ends.length + b)
    if (slot >= 0) & (tl.load(ends.way + b) != KNOWN):
        key = best_key(keys_ptr, b, case.target.cuts)
        token = pair_index(key).to(tl.int32)
        if pair_value(key) == float("-inf"):
            seed = tl.load(case.seed + b)
            counter = tl.load(ends.counter + b)
            token = _draw_from_target(case, b * width + slot, b, slot, seed, counter)
        tl.store(acceptance.output_token_ids + b * width + length - 1, token)
    finish_row(acceptance, width, b, length, WIDTH)
