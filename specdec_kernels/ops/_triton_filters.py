"""What every row may emit, in Triton: one token, or those whose values reach a threshold."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.ops._triton import launch_large
from specdec_kernels.ops._triton_batch import Batch, Rows, values_of_tile
from specdec_kernels.ops._triton_extremes import (
    EMPTY,
    Cuts,
    Filters,
    best_key,
    find_extremes,
    greedy_token,
    ranks,
    row_of_program,
)
from specdec_kernels.ops._triton_logits import (
    BLOCK,
    Edits,
    Logits,
    Window,
    nodes_of,
)
from specdec_kernels.ops._triton_numerics import (
    LARGEST_FLOAT,
    LARGEST_VOCABULARY,
    LOWEST_FLOAT,
    exp,
    pair_value,
    to_mass,
)
from specdec_kernels.ops._triton_thresholds import BINS, bin_of, threshold_of


def prepare(logits: Tensor, edits: Edits, window: Window, filters: Filters) -> Batch:
    """Three launches. Every row is read once, rows with top_k or top_p once more, and then only
    tiles that reach the bin of a threshold; two histograms of 16 KiB per row are the scratch."""
    rows = Logits.of(logits)
    if rows.vocab > LARGEST_VOCABULARY:
        raise ValueError(
            f"expected a vocabulary of at most {LARGEST_VOCABULARY} tokens, got {rows.vocab}"
        )
    cuts, bins = Cuts.of(rows), None
    if filters.top_k is not None:
        bins = logits.new_empty((rows.rows, 2, BINS.value), dtype=torch.int64)
    extremes = find_extremes(rows, edits, window, cuts, filters, bins)
    result = Rows(
        logits.new_empty(rows.rows, dtype=torch.int64),
        logits.new_empty(rows.rows, dtype=torch.int32),
        logits.new_empty(rows.rows, dtype=torch.float32),
        logits.new_empty(rows.rows, dtype=torch.float32),
    )
    batch = Batch(rows, edits, window, filters, cuts, extremes, result)
    if bins is not None:
        launch_large(_weigh_kernel, (rows.rows * cuts.pieces,), logits, batch, bins)
    launch_large(_threshold_kernel, (rows.rows,), logits, batch, bins)
    return batch


@triton.jit
def _weigh_kernel(
    batch,
    bins_ptr,
):
    """Counts of the values by bin for top_k, masses for top_p."""
    logits = batch.logits
    row, piece, b, slot = row_of_program(batch.cuts.pieces, logits.width)
    if slot >= nodes_of(batch.window, logits.width, b):
        return
    temperature = tl.load(batch.filters.temperature + b)
    counts, weighs = ranks(batch.filters, b, logits.vocab)
    raw = pair_value(best_key(batch.extremes.keys, row, batch.cuts))
    if (temperature > 0.0) & (counts | weighs):
        divisor = tl.minimum(temperature, LARGEST_FLOAT)
        largest = tl.div_rn(raw, divisor)
        if largest > float("-inf"):
            bins = bins_ptr + row.to(tl.int64) * 2 * BINS
            begin = piece * batch.cuts.tiles
            end = tl.minimum(begin + batch.cuts.tiles, tl.cdiv(logits.vocab, BLOCK))
            for tile in range(begin, end):
                _, values = values_of_tile(batch, b, slot, tile, temperature, largest)
                at = bin_of(values)
                kept = values >= LOWEST_FLOAT
                if counts:
                    ones = tl.full([BLOCK], 1, tl.int64)
                    tl.atomic_add(bins + at, ones, mask=kept, sem="relaxed")
                if weighs:
                    mass = to_mass(exp(values))
                    heavy = kept & (mass > 0)
                    tl.atomic_add(bins + BINS + at, mass, mask=heavy, sem="relaxed")


@triton.jit
def _threshold_kernel(
    batch,
    bins_ptr,
):
    logits = batch.logits
    row, _, b, slot = row_of_program(1, logits.width)
    if slot >= nodes_of(batch.window, logits.width, b):
        return
    token, status, raw = greedy_token(
        logits, batch.edits, batch.window, batch.cuts, batch.extremes, row, b, slot
    )
    temperature = tl.load(batch.filters.temperature + b)
    largest = raw
    threshold = tl.zeros_like(raw) + LOWEST_FLOAT
    if (temperature > 0.0) & (status == 0):
        largest = tl.div_rn(raw, tl.minimum(temperature, LARGEST_FLOAT))
        if largest == float("-inf"):
            status = tl.zeros_like(status) + EMPTY
        else:
            token = tl.zeros_like(token) - 1
            if batch.filters.top_k is not None:
                bins = bins_ptr + row.to(tl.int64) * 2 * BINS
                threshold = threshold_of(batch, bins, row, b, slot, temperature, largest)
    tl.store(batch.rows.tokens + row, token)
    tl.store(batch.rows.status + row, status)
    tl.store(batch.rows.largest + row, largest)
    tl.store(batch.rows.thresholds + row, threshold)
