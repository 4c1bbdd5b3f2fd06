"""An exact threshold on a row's values, in Triton, by one program.

top_k and top_p both ask for the smallest value whose larger ones weigh less than a target; the
weight is a count, or a mass. A histogram over bins of width 1/64 finds the bin that holds it,
further ones over the bits of its elements find the value. Weights are integers, so nothing depends
on the order of summation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.ops._triton_batch import largest_of_tile, mass_of_tiles, values_of_tile
from specdec_kernels.ops._triton_logits import BLOCK
from specdec_kernels.ops._triton_numerics import (
    LOWEST_FLOAT,
    exp,
    from_ordered_key,
    log,
    ordered_key,
    to_mass,
)

BINS = tl.constexpr(2048)


@triton.jit
def bin_of(values):
    """0 for the largest; the last bin takes the rest."""
    scaled = values * -64.0
    return tl.where(scaled < 2047.0, scaled, 2047.0).to(tl.int32)


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
    """The threshold inside a bin; `above` is the weight of the bins before it, and what is below
    `floor` does not count. Finds up to three digits of the distance from the bin's largest key,
    each by a histogram in scratch."""
    tiles = tl.cdiv(batch.logits.vocab, BLOCK)
    top = ordered_key(bin.to(tl.float32) * -0.015625).to(tl.int64)
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
                counted = (values >= floor) & (bin_of(values) == bin)
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
    return from_ordered_key((top - prefix).to(tl.int32))


@triton.jit
def _top_k(batch, bins, row, b, slot, temperature, largest, top_k):
    """The threshold of top_k, and the bin that it lies in."""
    counts = tl.load(bins + tl.arange(0, BINS))
    target = top_k.to(tl.float64)
    bin, above = _crossing(counts, tl.zeros_like(top_k).to(tl.int64), target)
    threshold = _refine(
        batch, bins, row, b, slot, temperature, largest, LOWEST_FLOAT, bin, above, target,
        MASS=False,
    )  # fmt: skip
    return threshold, bin


@triton.jit
def _top_p(batch, bins, row, b, slot, temperature, largest, top_p, threshold, last_bin):
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
    return _refine(
        batch, bins, row, b, slot, temperature, largest, threshold, bin, above, target,
        MASS=True,
    )  # fmt: skip


@triton.jit
def threshold_of(batch, bins, row, b, slot, temperature, largest):
    """top_k, then top_p, then min_p; ties at a threshold are kept, and the largest always is."""
    threshold = tl.zeros_like(largest) + LOWEST_FLOAT
    top_k = tl.load(batch.filters.top_k + b)
    last_bin = tl.zeros_like(top_k) + BINS
    if (top_k > 0) & (top_k < batch.logits.vocab):
        threshold, last_bin = _top_k(batch, bins, row, b, slot, temperature, largest, top_k)
    top_p = tl.load(batch.filters.top_p + b)
    if top_p < 1.0:
        threshold = _top_p(
            batch, bins, row, b, slot, temperature, largest, top_p, threshold, last_bin
        )
    min_p = tl.load(batch.filters.min_p + b)
    if min_p > 0.0:
        threshold = tl.maximum(threshold, log(tl.minimum(min_p, 1.0)))
    return threshold
