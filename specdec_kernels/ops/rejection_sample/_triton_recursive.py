"""The rules `recursive` and `token` in Triton: siblings in turn, up to the last token of each row.

Each is accepted with min(1, p/q); after a rejection p becomes norm(max(p - q, 0)) and q loses the
tried token. Nothing of size V is stored: what is left of p is computed anew from the sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.ops._triton import launch_large
from specdec_kernels.ops._triton_batch import largest_of_tile
from specdec_kernels.ops._triton_logits import BLOCK, centre, nodes_of, row_pointer
from specdec_kernels.ops._triton_numerics import exp, mass_as_float, to_mass
from specdec_kernels.ops._triton_random import coin
from specdec_kernels.ops._triton_walk import append, child_with_token, next_child
from specdec_kernels.ops.rejection_sample._triton_case import (
    FROM_RESIDUAL,
    FROM_REST,
    FROM_TARGET,
    FROM_TARGET_AGAIN,
    KNOWN,
    Case,
    Ends,
    draft_of,
    draft_tile,
    sum_of_pieces,
    target_of,
    target_tile,
    total_of,
    weight_of,
    window_width,
    write_end,
)
from specdec_kernels.tree import Acceptance


def walk_recursive(case: Case, acceptance: Acceptance) -> tuple[Ends, Tensor]:
    """One launch, one program per batch row. Returns the ends and the sums of rejected siblings,
    fp32 [B, T, 2]: what each left of target and draft."""
    like = case.target.logits.data
    batch, width = like.shape[0], case.target.logits.width
    ends = Ends.new(batch, like)
    sums = like.new_empty((batch, width, 2), dtype=torch.float32)
    constants = dict(DRAFT=case.draft is not None, WIDTH=window_width(case.target))
    launch_large(_walk_recursive_kernel, (batch,), like, case, acceptance, ends, sums, **constants)
    return ends, sums


@triton.jit
def is_repeated(window, width, b, slot, child, token, WIDTH: tl.constexpr):
    """Whether an earlier sibling holds the same token."""
    at = tl.arange(0, WIDTH)
    inside = (at > slot) & (at < child)
    tokens = tl.load(window.tokens + b * width + at, mask=inside, other=0)
    parents = tl.load(window.parents + b * width + at, mask=inside, other=-1)
    same = inside & (parents == slot) & (tokens == token)
    return tl.max(same.to(tl.int32), 0) > 0


@triton.jit
def _against_one_hot(case, row, b, slot, nodes, seed, position, WIDTH: tl.constexpr):
    """Siblings in turn, each against the target without those rejected. The accepted one, or -1."""
    target = case.target
    window, width = target.window, target.logits.width
    left = sum_of_pieces(case.masses, row, target.cuts)
    accepted = slot * 0 - 1
    child = next_child(window, width, b, nodes, slot, slot, WIDTH)
    while child >= 0:
        token = tl.load(window.tokens + b * width + child)
        following = next_child(window, width, b, nodes, slot, child, WIDTH)
        if is_repeated(window, width, b, slot, child, token, WIDTH) == 0:
            weight = weight_of(target, row, b, slot, token)
            if coin(seed, position, child) < tl.div_rn(weight, mass_as_float(left)):
                accepted = child
                following = following * 0 - 1
            else:
                left -= to_mass(weight)
        child = following
    return accepted


@triton.jit
def left_of_siblings(
    case, sums_ptr, b, slot, nodes, offs, target, draft, rejections, WIDTH: tl.constexpr
):
    """What `rejections` siblings leave of the target's probabilities of tokens offs, and of the
    draft's, neither of them normed."""
    window, width = case.target.window, case.target.logits.width
    child = next_child(window, width, b, nodes, slot, slot, WIDTH)
    level = rejections * 0
    while level < rejections:
        if level > 0:
            target = tl.div_rn(target, tl.load(sums_ptr + (b * width + level) * 2))
            target -= tl.div_rn(draft, tl.load(sums_ptr + (b * width + level) * 2 + 1))
        else:
            target -= draft
        target = tl.where(target > 0.0, target, 0.0)
        draft = tl.where(offs == tl.load(window.tokens + b * width + child), 0.0, draft)
        child = next_child(window, width, b, nodes, slot, child, WIDTH)
        level += 1
    return target, draft


@triton.jit
def _mass_left(
    case, sums_ptr, row, b, slot, nodes, total, draft_total, rejections, WIDTH: tl.constexpr
):
    """The mass of what `rejections` siblings leave of the target."""
    target = case.target
    temperature = tl.load(target.filters.temperature + b)
    largest = tl.load(target.rows.largest + row)
    threshold = tl.load(target.rows.thresholds + row)
    mass = tl.zeros([BLOCK], tl.int64)
    for tile in range(tl.cdiv(target.logits.vocab, BLOCK)):
        if largest_of_tile(target, row, tile, temperature, largest) >= threshold:
            offs, p = target_tile(
                case, row, b, slot, tile, -1, temperature, largest, threshold, total
            )
            q = draft_tile(case, row, b, slot, offs, draft_total)
            p, q = left_of_siblings(case, sums_ptr, b, slot, nodes, offs, p, q, rejections, WIDTH)
            mass += to_mass(p)
    return tl.sum(mass, 0)


@triton.jit
def _draft_mass(case, row, b, slot, total):
    """The mass of the draft's probabilities of all ids that have one."""
    draft = case.draft
    largest = tl.load(draft.rows.largest + row)
    mass = tl.zeros([BLOCK], tl.int64)
    for tile in range(tl.cdiv(draft.logits.vocab, BLOCK)):
        offs = tile * BLOCK + tl.arange(0, BLOCK)
        inside = offs < draft.logits.vocab
        at = row_pointer(draft.logits, b, slot)
        x = tl.load(at + offs, mask=inside, other=float("-inf")).to(tl.float32)
        if case.vocab_map is not None:
            id = tl.load(case.vocab_map + offs, mask=inside, other=-1)
            inside &= (id >= 0) & (id < case.draft_size)
        probabilities = tl.div_rn(exp(centre(x, 1.0, largest)), total)
        mass += tl.where(inside, to_mass(probabilities), 0)
    return tl.sum(mass, 0)


@triton.jit
def _against(case, sums_ptr, row, b, slot, nodes, seed, position, WIDTH: tl.constexpr):
    """Siblings in turn. The accepted one or -1, and how many were rejected."""
    window, width = case.target.window, case.target.logits.width
    total = total_of(case.target, case.masses, row)
    draft_total = total_of(case.draft, case.draft_masses, row)
    draft_mass = tl.zeros([], tl.int64)
    target_left = tl.zeros([], tl.float32) + 1.0
    draft_left = tl.zeros([], tl.float32) + 1.0
    rejections = slot * 0
    accepted = slot * 0 - 1
    child = next_child(window, width, b, nodes, slot, slot, WIDTH)
    while child >= 0:
        token = tl.load(window.tokens + b * width + child)
        following = next_child(window, width, b, nodes, slot, child, WIDTH)
        p = target_of(case, row, b, slot, token, total)
        q = draft_of(case, row, b, slot, token, draft_total)
        p, q = left_of_siblings(case, sums_ptr, b, slot, nodes, token, p, q, rejections, WIDTH)
        inside = (token >= 0) & (token < case.target.logits.vocab)
        u = coin(seed, position, child)
        if inside & (u * tl.div_rn(q, draft_left) < tl.div_rn(p, target_left)):
            accepted = child
            following = following * 0 - 1
        else:
            if following >= 0:
                if rejections == 0:
                    draft_mass = _draft_mass(case, row, b, slot, draft_total)
                draft_mass -= to_mass(q)
                rejections += 1
                mass = _mass_left(
                    case, sums_ptr, row, b, slot, nodes, total, draft_total, rejections, WIDTH
                )
                target_left = mass_as_float(mass)
                draft_left = mass_as_float(draft_mass)
                tl.store(sums_ptr + (b * width + rejections) * 2, target_left)
                tl.store(sums_ptr + (b * width + rejections) * 2 + 1, draft_left)
                tl.debug_barrier()
                if (target_left == 0.0) | (draft_left == 0.0):
                    following = following * 0 - 1
            else:
                rejections += 1
        child = following
    return accepted, rejections


@triton.jit
def _walk_recursive_kernel(
    case, acceptance, ends, sums_ptr, DRAFT: tl.constexpr, WIDTH: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    target = case.target
    window, width = target.window, target.logits.width
    nodes = nodes_of(window, width, b)
    seed = tl.load(case.seed + b)
    position = tl.load(case.position + b)
    slot = tl.where(nodes > 0, 0, -1)
    last = slot
    way = nodes * 0
    length = nodes * 0
    rejections = nodes * 0
    status = nodes * 0
    while slot >= 0:
        row = b * width + slot
        token = tl.load(target.rows.tokens + row)
        status |= tl.load(target.rows.status + row)
        child = slot * 0 - 1
        way = way * 0 + KNOWN
        if token >= 0:
            child = child_with_token(window, width, b, nodes, slot, token, WIDTH)
        else:
            if next_child(window, width, b, nodes, slot, slot, WIDTH) < 0:
                way = way * 0 + FROM_TARGET
            else:
                if DRAFT:
                    bad = tl.load(case.draft.rows.status + row)
                    status |= bad
                    way = way * 0 + FROM_TARGET_AGAIN
                    if bad == 0:
                        way = way * 0 + FROM_RESIDUAL
                        child, rejections = _against(
                            case, sums_ptr, row, b, slot, nodes, seed, position, WIDTH
                        )
                else:
                    way = way * 0 + FROM_REST
                    child = _against_one_hot(case, row, b, slot, nodes, seed, position, WIDTH)
            if child >= 0:
                token = tl.load(window.tokens + b * width + child)
        append(acceptance, width, b, length, slot, token)
        length += 1
        last = slot
        slot = child
        position += 1
    tl.store(acceptance.status + b, status)
    write_end(ends, b, last, way, position - 1, rejections, 1.0, length)
