"""Reading logits rows in Triton: raw, or with bias, penalties and mask applied on the way.

A row is a node of a verify window, batch row b and slot; `sample` has windows of one slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.ops._triton import launch
from specdec_kernels.ops._triton_numerics import LARGEST_FLOAT
from specdec_kernels.tree import LogitEdits

# Tokens of a row that a program handles at once.
BLOCK = tl.constexpr(2048)
# Of a program that handles tiles: one 16-byte load of 16-bit logits per thread.


class Logits(NamedTuple):
    """[B, T, V] with a dense last dimension; `width` is T."""

    data: Tensor
    stride_b: int
    stride_t: int
    vocab: int
    width: int

    @staticmethod
    def of(logits: Tensor) -> Logits:
        return Logits(logits, logits.stride(0), logits.stride(1), logits.shape[2], logits.shape[1])

    @property
    def rows(self) -> int:
        return self.data.shape[0] * self.width

    @property
    def tiles(self) -> int:
        return triton.cdiv(self.vocab, BLOCK.value)


class Window(NamedTuple):
    """tokens, parents [B, T] and num_nodes [B], contiguous; None for `sample`."""

    tokens: Tensor | None = None
    parents: Tensor | None = None
    num_nodes: Tensor | None = None


class Edits(NamedTuple):
    """LogitEdits for lookup: ids [B, size] ascending, with the sums of equal ids at the first."""

    ids: Tensor | None = None
    bias: Tensor | None = None
    counts: Tensor | None = None
    size: int = 0
    repetition: Tensor | None = None
    presence: Tensor | None = None
    frequency: Tensor | None = None
    allowed: Tensor | None = None

    @staticmethod
    def of(edits: LogitEdits) -> Edits:
        """Orders the ids of every row, which costs a few launches; nothing without edits."""
        ids, bias, counts, *others = (None if x is None else x.contiguous() for x in edits)
        size = 0 if ids is None else ids.shape[1]
        if ids is None or size == 0 or (bias is None and counts is None):
            return Edits(None, None, None, 0, *others)
        ids, order = ids.sort(dim=-1, stable=True)
        sums: list[Tensor | None] = [None, None]
        if bias is not None:
            bias, sums[0] = bias.gather(1, order), torch.empty_like(bias)
        if counts is not None:
            counts, sums[1] = counts.gather(1, order), torch.empty_like(counts)
        grid = (triton.cdiv(ids.numel(), 256),)
        launch(
            _merge_equal_kernel, grid, ids, ids, bias, counts, *sums, ids.numel(), size, BLOCK=256
        )
        return Edits(ids, sums[0], sums[1], size, *others)


@triton.jit
def _merge_equal_kernel(
    ids_ptr, bias_ptr, counts_ptr, bias_sum_ptr, counts_sum_ptr, total, size, BLOCK: tl.constexpr
):
    """Adds up, in order, the entries of equal ids that follow each entry."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    end = (at // size + 1) * size
    own = tl.load(ids_ptr + at, mask=inside, other=0)
    equal = inside
    bias = tl.zeros([BLOCK], tl.float32)
    counts = tl.full([BLOCK], -1, tl.int32)
    ahead = at
    while tl.max(equal.to(tl.int32), 0) > 0:
        if bias_ptr is not None:
            bias += tl.load(bias_ptr + ahead, mask=equal, other=0.0)
        if counts_ptr is not None:
            given = tl.load(counts_ptr + ahead, mask=equal, other=-1)
            both = (counts >= 0) & (given >= 0)
            counts = tl.where(both, counts + given, tl.maximum(counts, given))
        ahead += 1
        equal &= (ahead < end) & (tl.load(ids_ptr + ahead, mask=equal & (ahead < end)) == own)
    if bias_ptr is not None:
        tl.store(bias_sum_ptr + at, bias, mask=inside)
    if counts_ptr is not None:
        tl.store(counts_sum_ptr + at, counts, mask=inside)


# ---- one tile of a row


@triton.jit
def nodes_of(window, width, b):
    """Slots in use of batch row b."""
    nodes = width
    if window.num_nodes is not None:
        nodes = tl.minimum(tl.load(window.num_nodes + b), width)
    return nodes


@triton.jit
def parent_of(window, width, b, slot):
    """The parent of a drafted slot; the root for one that names no earlier slot."""
    parent = tl.load(window.parents + b * width + slot)
    return tl.where((parent > 0) & (parent < slot), parent, 0)


@triton.jit
def depth_of(window, width, b, slot):
    """Levels below the root."""
    depth = slot * 0
    if window.parents is not None:
        at = slot
        while at > 0:
            at = parent_of(window, width, b, at)
            depth += 1
    return depth


@triton.jit
def _first_at_least(ids_ptr, size, id):
    low = size * 0
    high = size
    while low < high:
        middle = (low + high) // 2
        below = tl.load(ids_ptr + middle) < id
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def _listed(edits, b, offs, x, count, SIZE: tl.constexpr):
    """Adds the bias of the row's list, and finds its counts."""
    ids_ptr = edits.ids + b * edits.size
    first = tl.min(offs, 0)
    begin = _first_at_least(ids_ptr, edits.size, first)
    end = _first_at_least(ids_ptr, edits.size, first + SIZE)
    if begin < end:
        low = tl.zeros([SIZE], tl.int32) + begin
        high = tl.zeros([SIZE], tl.int32) + end
        span = end - begin
        while span > 0:
            searches = low < high
            middle = (low + high) // 2
            below = tl.load(ids_ptr + middle, mask=searches, other=0) < offs
            low = tl.where(searches & below, middle + 1, low)
            high = tl.where(searches & (below == 0), middle, high)
            span = span // 2
        found = low < end
        found &= tl.load(ids_ptr + low, mask=found, other=-1) == offs
        at = b * edits.size + low
        if edits.bias is not None:
            bias = tl.load(edits.bias + at, mask=found, other=0.0)
            x = tl.where(bias == float("-inf"), float("-inf"), x + bias)
        if edits.counts is not None:
            count = tl.load(edits.counts + at, mask=found, other=-1)
    return x, count


@triton.jit
def _drafted(window, width, b, slot, offs, count):
    """Counts the drafted tokens on the way from the root to the slot."""
    at = slot
    while at > 0:
        token = tl.load(window.tokens + b * width + at)
        count = tl.where(offs == token, tl.maximum(count, 0) + 1, count)
        at = parent_of(window, width, b, at)
    return count


@triton.jit
def _penalised(edits, b, x, count):
    if edits.repetition is not None:
        penalty = tl.load(edits.repetition + b)
        x = tl.where(count >= 0, tl.where(x < 0.0, x * penalty, tl.div_rn(x, penalty)), x)
    if edits.frequency is not None:
        penalty = tl.load(edits.frequency + b)
        x = tl.where(count > 0, x - penalty * count.to(tl.float32), x)
    if edits.presence is not None:
        x = tl.where(count > 0, x - tl.load(edits.presence + b), x)
    return x


@triton.jit
def edited(logits, edits, window, b, slot, offs, x, SIZE: tl.constexpr):
    """Bias, penalties and mask on the logits x of tokens offs, SIZE consecutive ones."""
    count = tl.full([SIZE], -1, tl.int32)
    if edits.ids is not None:
        x, count = _listed(edits, b, offs, x, count, SIZE)
    if edits.repetition is not None or edits.frequency is not None or edits.presence is not None:
        if window.parents is not None:
            count = _drafted(window, logits.width, b, slot, offs, count)
        x = _penalised(edits, b, x, count)
    if edits.allowed is not None:
        words = (logits.vocab + 31) // 32
        at = (b * logits.width + slot) * words + offs // 32
        word = tl.load(edits.allowed + at, mask=offs < logits.vocab, other=0)
        x = tl.where((word >> (offs % 32)) & 1 == 0, float("-inf"), x)
    return x


@triton.jit
def row_pointer(logits, b, slot):
    return logits.data + b * logits.stride_b + slot.to(tl.int64) * logits.stride_t


@triton.jit
def load_tile(logits, edits, window, b, slot, tile):
    """Tokens and fp32 logits of a tile; -infinity beyond the end. b is int64."""
    offs = tile * BLOCK + tl.arange(0, BLOCK)
    row = row_pointer(logits, b, slot)
    x = tl.load(row + offs, mask=offs < logits.vocab, other=float("-inf")).to(tl.float32)
    return offs, edited(logits, edits, window, b, slot, offs, x, BLOCK)


@triton.jit
def load_token(logits, edits, window, b, slot, token):
    """The fp32 logit of one token inside the vocabulary."""
    offs = token.to(tl.int32) + tl.arange(0, 1)
    row = row_pointer(logits, b, slot)
    x = tl.load(row + offs).to(tl.float32)
    return tl.max(edited(logits, edits, window, b, slot, offs, x, 1), 0)


@triton.jit
def centre(x, temperature, largest):
    """Processed logits less their maximum; +infinity counts as one-hot."""
    divisor = tl.where(temperature < LARGEST_FLOAT, temperature, LARGEST_FLOAT)
    if divisor != 1.0:
        x = tl.div_rn(x, divisor)
    one_hot = tl.where(x == float("inf"), 0.0, float("-inf"))
    return tl.where(largest == float("inf"), one_hot, x - largest)
