"""Following a verify window and writing an Acceptance, in Triton.

Scalars that a loop carries start as `nodes * 0` and the like: tensors of their final type, which a
plain 0 would not be.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def child_with_token(window, width, b, nodes, slot, token, WIDTH: tl.constexpr):
    """The first child of the slot that holds the token, or -1."""
    at = tl.arange(0, WIDTH)
    inside = (at > slot) & (at < nodes)
    tokens = tl.load(window.tokens + b * width + at, mask=inside, other=0)
    parents = tl.load(window.parents + b * width + at, mask=inside, other=-1)
    child = tl.min(tl.where(inside & (parents == slot) & (tokens == token), at, WIDTH), 0)
    return tl.where(child < WIDTH, child, -1)


@triton.jit
def next_child(window, width, b, nodes, slot, previous, WIDTH: tl.constexpr):
    """The first child of the slot behind `previous`, or -1."""
    at = tl.arange(0, WIDTH)
    inside = (at > slot) & (at > previous) & (at < nodes)
    parents = tl.load(window.parents + b * width + at, mask=inside, other=-1)
    child = tl.min(tl.where(inside & (parents == slot), at, WIDTH), 0)
    return tl.where(child < WIDTH, child, -1)


@triton.jit
def append(acceptance, width, b, length, slot, token):
    tl.store(acceptance.path + b * width + length, slot)
    tl.store(acceptance.output_token_ids + b * width + length, token)


@triton.jit
def finish_row(acceptance, width, b, length, WIDTH: tl.constexpr):
    """Pads a row of `length` emitted tokens."""
    at = tl.arange(0, WIDTH)
    rest = (at >= length) & (at < width)
    tl.store(acceptance.path + b * width + at, -1, mask=rest)
    tl.store(acceptance.output_token_ids + b * width + at, -1, mask=rest)
    tl.store(acceptance.num_accepted + b, tl.maximum(length - 1, 0))
