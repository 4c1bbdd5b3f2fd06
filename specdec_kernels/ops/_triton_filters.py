"""What every row may emit, in Triton: one token, or those above an exact threshold on its values.

A value is the processed logit less the row's maximum, 0 or below. top_k and top_p both ask for the
smallest value whose larger ones weigh less than a target; the weight is a count, or a mass. A
histogram over bins of width 1/64 finds the bin that holds it, further ones over the bits of its
elements find the value. Weights are integers, so nothing depends on the order of summation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.ops._triton import launch
from specdec_kernels.ops._triton_extremes import (
    EMPTY,
    Cuts,
    Extremes,
    best_key,
    find_extremes,
    greedy_token,
    row_of_program,
)
from specdec_kernels.ops._triton_logits import (
    BLOCK,
    WARPS,
    Edits,
    Logits,
    Window,
    centre,
    launch_large,
    load_tile,
    nodes_of,
)
from specdec_kernels.ops._triton_numerics import (
    LARGEST_VOCABULARY,
    LOWEST_FLOAT,
    NEGLIGIBLE,
    exp,
    from_ordered_key,
    log,
    ordered_key,
    pair_value,
    to_mass,
)

BINS = tl.constexpr(2048)


class Filters(NamedTuple):
    """temperature, top_k, top_p, min_p [B]; the last three None for a draft's rows."""

    temperature: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None


class Rows(NamedTuple):
    """All [rows]. tokens: the one possible token, int64, or -1 for a row to draw from. status:
    int32. largest: of the processed logits, fp32. thresholds: values from here on are kept, fp32.
    """

    tokens: Tensor
    status: Tensor
    largest: Tensor
    thresholds: Tensor


class Batch(NamedTuple):
    """What the kernels of the sampling ops know of the rows of one model."""

    logits: Logits
    edits: Edits
    window: Window
    filters: Filters
    cuts: Cuts
    extremes: Extremes
    rows: Rows


def prepare(logits: Tensor, edits: Edits, window: Window, filters: Filters) -> Batch:
    """Three launches. Every row is read once, rows with top_k or top_p once more, and then only
    tiles that reach the bin of a threshold; two histograms of 16 KiB per row are the scratch."""
    rows = Logits.of(logits)
    if rows.vocab > LARGEST_VOCABULARY:
        raise ValueError(
            f"expected a vocabulary of at most {LARGEST_VOCABULARY} tokens, got {rows.vocab}"
        )
    cuts = Cuts.of(rows)
    extremes = find_extremes(rows, edits, window, cuts, keeps_maxima=True)
    result = Rows(
        logits.new_empty(rows.rows, dtype=torch.int64),
        logits.new_empty(rows.rows, dtype=torch.int32),
        logits.new_empty(rows.rows, dtype=torch.float32),
        logits.new_empty(rows.rows, dtype=torch.float32),
    )
    batch = Batch(rows, edits, window, filters, cuts, extremes, result)
    bins = None
    if filters.top_k is not None:
        bins = logits.new_zeros((rows.rows, 2, BINS.value), dtype=torch.int64)
        launch(_weigh_kernel, (rows.rows * cuts.pieces,), logits, batch, bins, num_warps=WARPS)
    launch_large(_threshold_kernel, (rows.rows,), logits, batch, bins)
    return batch


# ---- values


@triton.jit
def values_of_tile(batch, b, slot, tile, temperature, largest):
    offs, x = load_tile(batch.logits, batch.edits, batch.window, b, slot, tile)
    return offs, centre(x, temperature, largest)


@triton.jit
def largest_of_tile(batch, row, tile, temperature, largest):
    """The largest value of a tile, without reading it."""
    tiles = tl.cdiv(batch.logits.vocab, BLOCK)
    return centre(
        tl.load(batch.extremes.maxima + row.to(tl.int64) * tiles + tile), temperature, largest
    )


@triton.jit
def _bin_of(values):
    """0 for the largest; the last bin takes the rest."""
    scaled = values * -64.0
    return tl.where(scaled < 2047.0, scaled, 2047.0).to(tl.int32)


# ---- the first histogram, by all programs of a row


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
    top_k = tl.load(batch.filters.top_k + b)
    counts = (top_k > 0) & (top_k < logits.vocab)
    weighs = tl.load(batch.filters.top_p + b) < 1.0
    raw = pair_value(best_key(batch.extremes.keys, row, batch.cuts))
    if (temperature > 0.0) & (counts | weighs):
        divisor = tl.minimum(temperature, 3.4028234663852886e38)
        largest = tl.div_rn(raw, divisor)
        if largest > float("-inf"):
            bins = bins_ptr + row.to(tl.int64) * 2 * BINS
            begin = piece * batch.cuts.tiles
            end = tl.minimum(begin + batch.cuts.tiles, tl.cdiv(logits.vocab, BLOCK))
            for tile in range(begin, end):
                _, values = values_of_tile(batch, b, slot, tile, temperature, largest)
                at = _bin_of(values)
                kept = values >= LOWEST_FLOAT
                if counts:
                    ones = tl.full([BLOCK], 1, tl.int64)
                    tl.atomic_add(bins + at, ones, mask=kept, sem="relaxed")
                if weighs:
                    mass = to_mass(exp(values))
                    heavy = kept & (mass > 0)
                    tl.atomic_add(bins + BINS + at, mass, mask=heavy, sem="relaxed")


# ---- the threshold, by one program per row


@triton.jit
def _crossing(weights, above, target):
    """The last bin in use whose weight above is below target, but at least the first one in use;
    and the weight above it."""
    bin = tl.arange(0, BINS)
    sums = above + tl.cumsum(weights, 0)
    before = sums - weights
    used = weights > 0
    first = tl.min(tl.where(used, bin, BINS), 0)
    below = used & (before.to(tl.float64) < target)
    chosen = tl.maximum(tl.max(tl.where(below, bin, -1), 0), first)
    return chosen, tl.sum(tl.where(bin == chosen, before, 0), 0)


@triton.jit
def _refine(
    batch, scratch, row, b, slot, temperature, largest, floor, bin, above, target,
    MASS: tl.constexpr,
):  # fmt: skip
    """The threshold inside a bin, and the weight of the values above it. What is below `floor`
    does not count. Three digits of the distance from the bin's largest key."""
    tiles = tl.cdiv(batch.logits.vocab, BLOCK)
    top = ordered_key(bin.to(tl.float32) * -0.015625).to(tl.int64)
    upper = bin.to(tl.float32) * -0.015625
    lower = tl.where(bin < 2047, (bin + 1).to(tl.float32) * -0.015625, float("-inf"))
    prefix = top * 0
    at = tl.arange(0, BINS)
    span = top - ordered_key(tl.maximum(lower, LOWEST_FLOAT)).to(tl.int64)
    shift = tl.where(span < 1 << 22, 11, 22)
    while shift >= 0:
        tl.store(scratch + at, tl.zeros([BINS], tl.int64))
        tl.debug_barrier()
        for tile in range(tiles):
            if largest_of_tile(batch, row, tile, temperature, largest) >= lower:
                _, values = values_of_tile(batch, b, slot, tile, temperature, largest)
                counted = (values >= floor) & (_bin_of(values) == bin) & (values <= upper)
                distance = top - ordered_key(values).to(tl.int64)
                counted &= (distance >> (shift + 11)) == prefix
                digit = ((distance >> shift) & 2047).to(tl.int32)
                weight = tl.full([BLOCK], 1, tl.int64)
                if MASS:
                    weight = to_mass(exp(values))
                    counted &= weight > 0
                tl.atomic_add(scratch + digit, weight, mask=counted, sem="relaxed")
        tl.debug_barrier()
        weights = tl.load(scratch + at, volatile=True)
        digit, above = _crossing(weights, above, target)
        tl.debug_barrier()
        prefix = (prefix << 11) | digit
        shift -= 11
    return from_ordered_key((top - prefix).to(tl.int32)), above


@triton.jit
def mass_of_tiles(
    batch, row, b, slot, begin, end, temperature, largest, threshold,
):  # fmt: skip
    """The mass of the kept values of some tiles; those that keep nothing are not read."""
    sums = tl.zeros([BLOCK], tl.int64)
    floor = tl.maximum(threshold, NEGLIGIBLE)
    for tile in range(begin, end):
        if largest_of_tile(batch, row, tile, temperature, largest) >= floor:
            _, values = values_of_tile(batch, b, slot, tile, temperature, largest)
            sums += tl.where(values >= threshold, to_mass(exp(values)), 0)
    return tl.sum(sums, 0)


@triton.jit
def _top_k(
    batch, bins, row, b, slot, temperature, largest, top_k,
):  # fmt: skip
    """The threshold of top_k, and the bin that it lies in."""
    counts = tl.load(bins + tl.arange(0, BINS))
    target = top_k.to(tl.float64)
    bin, above = _crossing(counts, tl.zeros_like(top_k).to(tl.int64), target)
    threshold, _ = _refine(
        batch, bins, row, b, slot, temperature, largest, LOWEST_FLOAT, bin, above, target,
        False,
    )  # fmt: skip
    return threshold, bin


@triton.jit
def _top_p(
    batch, bins, row, b, slot, temperature, largest, top_p, threshold, last_bin,
):  # fmt: skip
    """The threshold of top_p among the values from `threshold`, in bin last_bin, on."""
    at = tl.arange(0, BINS)
    masses = tl.load(bins + BINS + at)
    if last_bin < BINS:  # part of the last bin is out already
        tiles = tl.cdiv(batch.logits.vocab, BLOCK)
        kept = mass_of_tiles(batch, row, b, slot, 0, tiles, temperature, largest, threshold)
        before = tl.sum(tl.where(at < last_bin, masses, 0), 0)
        masses = tl.where(at < last_bin, masses, tl.where(at == last_bin, kept - before, 0))
    target = top_p.to(tl.float64) * tl.sum(masses, 0).to(tl.float64)
    bin, above = _crossing(masses, tl.zeros_like(last_bin).to(tl.int64), target)
    result, _ = _refine(
        batch, bins, row, b, slot, temperature, largest, threshold, bin, above, target,
        True,
    )  # fmt: skip
    return result


@triton.jit
def _threshold_of(
    batch, bins, row, b, slot, temperature, largest,
):  # fmt: skip
    """top_k, then top_p, then min_p; ties at a threshold are kept, and the largest always is."""
    threshold = tl.zeros_like(largest) + LOWEST_FLOAT
    top_k = tl.load(batch.filters.top_k + b)
    last_bin = tl.zeros_like(top_k) + BINS
    if (top_k > 0) & (top_k < batch.logits.vocab):
        threshold, last_bin = _top_k(batch, bins, row, b, slot, temperature, largest, top_k)
    top_p = tl.load(batch.filters.top_p + b)
    if top_p < 1.0:
        threshold = _top_p(
            batch, bins, row, b, slot, temperature, largest, top_p, threshold, last_bin,
        )  # fmt: skip
    min_p = tl.load(batch.filters.min_p + b)
    if min_p > 0.0:
        threshold = tl.maximum(threshold, log(tl.minimum(min_p, 1.0)))
    return threshold


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
        largest = tl.div_rn(raw, tl.minimum(temperature, 3.4028234663852886e38))
        if largest == float("-inf"):
            status = tl.zeros_like(status) + EMPTY
        else:
            token = tl.zeros_like(token) - 1
            if batch.filters.top_k is not None:
                bins = bins_ptr + row.to(tl.int64) * 2 * BINS
                threshold = _threshold_of(batch, bins, row, b, slot, temperature, largest)
    tl.store(batch.rows.tokens + row, token)
    tl.store(batch.rows.status + row, status)
    tl.store(batch.rows.largest + row, largest)
    tl.store(batch.rows.thresholds + row, threshold)
