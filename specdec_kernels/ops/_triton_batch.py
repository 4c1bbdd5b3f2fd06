"""The rows of one model as the sampling kernels know them, and their values.

A value is the processed logit less the row's maximum, 0 or below.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.ops._triton_extremes import Cuts, Extremes, Filters
from specdec_kernels.ops._triton_logits import BLOCK, Edits, Logits, Window, centre, load_tile
from specdec_kernels.ops._triton_numerics import NEGLIGIBLE, exp, to_mass


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
