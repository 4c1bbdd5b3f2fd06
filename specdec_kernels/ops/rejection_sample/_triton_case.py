"""Target and draft probabilities at the nodes of verify windows, in Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.ops._triton import WARPS, launch
from specdec_kernels.ops._triton_batch import Batch, mass_of_tiles, values_of_tile
from specdec_kernels.ops._triton_extremes import MOST_PIECES, row_of_program
from specdec_kernels.ops._triton_logits import (
    BLOCK,
    centre,
    load_token,
    nodes_of,
    row_pointer,
)
from specdec_kernels.ops._triton_numerics import exp, mass_as_float
from specdec_kernels.ops._triton_walk import next_child
from specdec_kernels.tree import SamplingParams

# How the last token of a row comes about.
KNOWN = tl.constexpr(0)
FROM_TARGET = tl.constexpr(1)  # stream BONUS
FROM_REST = tl.constexpr(2)  # what the rejected siblings leave of the target, stream RESIDUAL
FROM_RESIDUAL = tl.constexpr(3)  # of target and draft, stream RESIDUAL
FROM_TARGET_AGAIN = tl.constexpr(4)  # stream RESIDUAL


class Case(NamedTuple):
    """What the rules know. Masses are int64 [rows, pieces], of the rows that have children.

    draft: rows of draft logits, or None. inverse: draft id of every target id, int64 [V], or None.
    vocab_map: target id of every draft id. draft_size: ids that have a draft probability.
    """

    target: Batch
    masses: Tensor
    draft: Batch | None
    draft_masses: Tensor | None
    vocab_map: Tensor | None
    inverse: Tensor | None
    draft_size: int
    seed: Tensor
    position: Tensor
    step: Tensor


class Ends(NamedTuple):
    """Of each batch row: the last slot (-1 for a finished row), the KNOWN .. way to its token, the
    counter of the noise, rejections at the slot, the target's weight (block), tokens emitted."""

    slot: Tensor
    way: Tensor
    counter: Tensor
    rejections: Tensor
    weight: Tensor
    length: Tensor

    @staticmethod
    def new(batch: int, like: Tensor) -> Ends:
        dtypes = (torch.int32, torch.int32, torch.int64, torch.int32, torch.float32, torch.int32)
        return Ends(*(like.new_empty(batch, dtype=dtype) for dtype in dtypes))


def window_width(target: Batch) -> int:
    return triton.next_power_of_2(target.logits.width)


def make_case(
    target: Batch, draft: Batch | None, vocab_map: Tensor | None, sampling: SamplingParams
) -> Case:
    """Adds the masses, which reads the rows of nodes with children once more."""
    counters = (x.contiguous() for x in (sampling.seed, sampling.position, sampling.step))
    masses = find_masses(target)
    if draft is None:
        return Case(target, masses, None, None, None, None, 0, *counters)
    vocab, inverse = target.logits.vocab, None
    if vocab_map is not None:
        inverse = inverse_of(vocab_map, vocab)
    size = max(vocab, draft.logits.vocab) if vocab_map is None else vocab
    return Case(
        target,
        masses,
        draft,
        find_masses(draft, of_draft=True),
        vocab_map,
        inverse,
        size,
        *counters,
    )


def inverse_of(vocab_map: Tensor, vocab: int) -> Tensor:
    inside = (vocab_map >= 0) & (vocab_map < vocab)
    inverse = vocab_map.new_full((vocab + 1,), -1)
    at = torch.where(inside, vocab_map, vocab)
    return inverse.scatter_(0, at, torch.arange(len(vocab_map), device=vocab_map.device))


def find_masses(batch: Batch, of_draft: bool = False) -> Tensor:
    rows, pieces = batch.logits.rows, batch.cuts.pieces
    masses = batch.logits.data.new_empty((rows, pieces), dtype=torch.int64)
    constants = dict(WIDTH=window_width(batch), OF_DRAFT=of_draft, num_warps=WARPS)
    launch(_masses_kernel, (rows * pieces,), masses, batch, masses, **constants)
    return masses


@triton.jit
def is_parent(batch, b, slot, WIDTH: tl.constexpr):
    """Whether a slot in use has children."""
    width = batch.logits.width
    nodes = nodes_of(batch.window, width, b)
    return (slot < nodes) & (next_child(batch.window, width, b, nodes, slot, slot, WIDTH) >= 0)


@triton.jit
def _masses_kernel(batch, masses_ptr, WIDTH: tl.constexpr, OF_DRAFT: tl.constexpr):
    """A draft's window ends before the last child, so that all of its rows are weighed."""
    row, piece, b, slot = row_of_program(batch.cuts.pieces, batch.logits.width)
    if OF_DRAFT:
        needed = slot < nodes_of(batch.window, batch.logits.width, b)
    else:
        needed = is_parent(batch, b, slot, WIDTH)
    if needed & (tl.load(batch.rows.tokens + row) < 0):
        temperature = tl.load(batch.filters.temperature + b)
        largest = tl.load(batch.rows.largest + row)
        threshold = tl.load(batch.rows.thresholds + row)
        begin = piece * batch.cuts.tiles
        end = tl.minimum(begin + batch.cuts.tiles, tl.cdiv(batch.logits.vocab, BLOCK))
        mass = mass_of_tiles(batch, row, b, slot, begin, end, temperature, largest, threshold)
        tl.store(masses_ptr + row.to(tl.int64) * batch.cuts.pieces + piece, mass)


# ---- one row


@triton.jit
def sum_of_pieces(parts_ptr, row, cuts):
    lane = tl.arange(0, MOST_PIECES)
    at = row.to(tl.int64) * cuts.pieces + lane
    return tl.sum(tl.load(parts_ptr + at, mask=lane < cuts.pieces, other=0), 0)


@triton.jit
def total_of(batch, masses_ptr, row):
    """The sum of the row's weights; anything for a decided row."""
    return mass_as_float(sum_of_pieces(masses_ptr, row, batch.cuts))


@triton.jit
def weight_of(batch, row, b, slot, token):
    """exp(value) of a token, 0 outside of the kept set and the vocabulary. Of undecided rows."""
    weight = tl.zeros([], tl.float32)
    if (token >= 0) & (token < batch.logits.vocab):
        x = load_token(batch.logits, batch.edits, batch.window, b, slot, token)
        temperature = tl.load(batch.filters.temperature + b)
        value = centre(x, temperature, tl.load(batch.rows.largest + row))
        weight = tl.where(value >= tl.load(batch.rows.thresholds + row), exp(value), 0.0)
    return weight


@triton.jit
def target_of(case, row, b, slot, token, total):
    """The target's probability of a token."""
    decided = tl.load(case.target.rows.tokens + row)
    probability = tl.where(decided == token, 1.0, 0.0)
    if decided < 0:
        probability = tl.div_rn(weight_of(case.target, row, b, slot, token), total)
    return probability


@triton.jit
def draft_of(case, row, b, slot, token, total):
    """The draft's probability of a token, 0 outside of its vocabulary."""
    id = token
    if case.inverse is not None:
        id = tl.zeros_like(token) - 1
        if (token >= 0) & (token < case.target.logits.vocab):
            id = tl.load(case.inverse + token)
    return tl.div_rn(weight_of(case.draft, row, b, slot, id), total)


@triton.jit
def target_tile(case, row, b, slot, tile, decided, temperature, largest, threshold, total):
    """Tokens and the target's probabilities of a tile."""
    offs = tile * BLOCK + tl.arange(0, BLOCK)
    probabilities = tl.where(offs == decided, 1.0, 0.0)
    if decided < 0:
        _, values = values_of_tile(case.target, b, slot, tile, temperature, largest)
        weights = tl.where(values >= threshold, exp(values), 0.0)
        probabilities = tl.div_rn(weights, total)
    return offs, probabilities


@triton.jit
def draft_tile(case, row, b, slot, offs, total):
    """The draft's probabilities of target ids offs."""
    logits = case.draft.logits
    inside = offs < case.target.logits.vocab
    id = offs
    if case.inverse is not None:
        id = tl.load(case.inverse + offs, mask=inside, other=-1)
    inside &= (id >= 0) & (id < logits.vocab)
    at = row_pointer(logits, b, slot) + id
    x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    weights = exp(centre(x, 1.0, tl.load(case.draft.rows.largest + row)))
    return tl.div_rn(tl.where(inside, weights, 0.0), total)


@triton.jit
def write_end(ends, b, slot, way, counter, rejections, weight, length):
    tl.store(ends.slot + b, slot)
    tl.store(ends.way + b, way)
    tl.store(ends.counter + b, counter)
    tl.store(ends.rejections + b, rejections)
    tl.store(ends.weight + b, weight)
    tl.store(ends.length + b, length)
