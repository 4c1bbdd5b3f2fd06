"""The rule `block` in Triton: weights along the chain, all residual masses at once, the last node
that stands.

With w_0 = 1 and w_i = min(w_{i-1} p(x_i) / q(x_i), 1), node i stands with probability
m_i / (m_i + 1 - w_i), m_i the mass of max(w_i p - q, 0), and the last node with w_i.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.ops._triton import launch, launch_large
from specdec_kernels.ops._triton_batch import largest_of_tile
from specdec_kernels.ops._triton_extremes import row_of_program
from specdec_kernels.ops._triton_logits import BLOCK, nodes_of
from specdec_kernels.ops._triton_numerics import mass_as_float, to_mass
from specdec_kernels.ops._triton_random import coin
from specdec_kernels.ops._triton_walk import append
from specdec_kernels.ops.rejection_sample._triton_case import (
    FROM_RESIDUAL,
    FROM_TARGET,
    KNOWN,
    Case,
    Ends,
    draft_of,
    sum_of_pieces,
    target_of,
    target_tile,
    total_of,
    window_width,
    write_end,
)
from specdec_kernels.ops.rejection_sample._triton_end import block_residual
from specdec_kernels.tree import Acceptance


class Chain(NamedTuple):
    """weights: w of each slot, fp32 [B, T]. looked_at: slots with a weight, int32 [B]. open: the
    last of them has no draft to hold against, int32 [B]. masses: m, int64 [rows, pieces]."""

    weights: Tensor
    looked_at: Tensor
    open: Tensor
    masses: Tensor


def walk_block(case: Case, acceptance: Acceptance) -> Ends:
    """Three launches. Reads the rows of the chain and their draft rows once more."""
    target, like = case.target, case.target.logits.data
    batch, width, pieces = like.shape[0], target.logits.width, target.cuts.pieces
    chain = Chain(
        like.new_empty((batch, width), dtype=torch.float32),
        like.new_empty(batch, dtype=torch.int32),
        like.new_empty(batch, dtype=torch.int32),
        like.new_empty((batch * width, pieces), dtype=torch.int64),
    )
    ends = Ends.new(batch, like)
    draft = dict(DRAFT=case.draft is not None)
    constants = dict(WIDTH=window_width(target), **draft)
    launch(_weights_kernel, (batch,), like, case, acceptance, chain, **constants)
    launch_large(_residuals_kernel, (batch * width * pieces,), like, case, chain, **draft)
    launch(_walk_block_kernel, (batch,), like, case, acceptance, chain, ends, num_warps=1)
    return ends


@triton.jit
def chain_nodes(window, width, b, WIDTH: tl.constexpr):
    """Slots in use up to the first that is not the child of the one before."""
    nodes = nodes_of(window, width, b)
    at = tl.arange(0, WIDTH)
    parents = tl.load(window.parents + b * width + at, mask=at < nodes, other=-9)
    ends = (at > 0) & (parents != at - 1)
    return tl.minimum(tl.maximum(nodes, 0), tl.min(tl.where(ends, at, WIDTH), 0))


@triton.jit
def _weights_kernel(case, acceptance, chain, DRAFT: tl.constexpr, WIDTH: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    target = case.target
    window, width = target.window, target.logits.width
    nodes = chain_nodes(window, width, b, WIDTH)
    status = nodes * 0
    slot = nodes * 0
    is_open = nodes * 0
    weight = tl.zeros([], tl.float32) + 1.0
    more = nodes > 0
    while more:
        row = b * width + slot
        status |= tl.load(target.rows.status + row)
        tl.store(chain.weights + b * width + slot, weight)
        more = slot + 1 < nodes
        is_open = is_open * 0 + 1
        if DRAFT:  # noqa: SIM102  decided at compile time
            if more:
                bad = tl.load(case.draft.rows.status + row)
                status |= bad
                more = bad == 0
        if more:
            is_open = is_open * 0
            token = tl.load(window.tokens + b * width + slot + 1)
            total = total_of(target, case.masses, row)
            joint = weight * target_of(case, row, b, slot, token, total)
            q = tl.zeros([], tl.float32) + 1.0
            if DRAFT:
                draft_total = total_of(case.draft, case.draft_masses, row)
                q = draft_of(case, row, b, slot, token, draft_total)
            outside = (token < 0) | (token >= target.logits.vocab)
            more = (joint > 0.0) & (outside == 0)
            weight = tl.where(joint >= q, 1.0, tl.div_rn(joint, q))
        slot += 1
    tl.store(chain.looked_at + b, slot)
    tl.store(chain.open + b, is_open)
    tl.store(acceptance.status + b, status)


@triton.jit
def _residuals_kernel(case, chain, DRAFT: tl.constexpr):
    target = case.target
    row, piece, b, slot = row_of_program(target.cuts.pieces, target.logits.width)
    looked_at = tl.load(chain.looked_at + b)
    if slot >= looked_at - tl.load(chain.open + b):
        return
    weight = tl.load(chain.weights + row)
    if weight >= 1.0:
        return
    decided = tl.load(target.rows.tokens + row)
    temperature = tl.load(target.filters.temperature + b)
    largest = tl.load(target.rows.largest + row)
    threshold = tl.load(target.rows.thresholds + row)
    total = total_of(target, case.masses, row)
    draft_total = total
    if DRAFT:
        draft_total = total_of(case.draft, case.draft_masses, row)
    begin = piece * target.cuts.tiles
    end = tl.minimum(begin + target.cuts.tiles, tl.cdiv(target.logits.vocab, BLOCK))
    mass = tl.zeros([BLOCK], tl.int64)
    for tile in range(begin, end):
        keeps = decided // BLOCK == tile
        if decided < 0:
            keeps = largest_of_tile(target, row, tile, temperature, largest) >= threshold
        if keeps:
            offs, p = target_tile(
                case, row, b, slot, tile, decided, temperature, largest, threshold, total
            )
            left = block_residual(case, b, slot, row, offs, p, weight, draft_total, DRAFT)
            mass += to_mass(left)
    tl.store(chain.masses + row.to(tl.int64) * target.cuts.pieces + piece, tl.sum(mass, 0))


@triton.jit
def _walk_block_kernel(case, acceptance, chain, ends):
    b = tl.program_id(0).to(tl.int64)
    target = case.target
    width = target.logits.width
    looked_at = tl.load(chain.looked_at + b)
    is_open = tl.load(chain.open + b)
    seed = tl.load(case.seed + b)
    step = tl.load(case.step + b)
    last = looked_at * 0
    for slot in range(1, looked_at):
        likelihood = tl.load(chain.weights + b * width + slot)
        if (slot < looked_at - is_open) & (likelihood < 1.0):
            parts = sum_of_pieces(chain.masses, b * width + slot, target.cuts)
            mass = mass_as_float(parts)
            likelihood = tl.div_rn(mass, mass + (1.0 - likelihood))
        last = tl.where(coin(seed, step, last * 0 + slot) < likelihood, slot, last)
    way = last * 0 + KNOWN
    if looked_at > 0:
        for slot in range(0, last):
            token = tl.load(target.window.tokens + b * width + slot + 1)
            append(acceptance, width, b, slot, slot, token)
        token = tl.load(target.rows.tokens + b * width + last)
        if token < 0:
            at_end = (is_open > 0) & (last == looked_at - 1)
            way = tl.where(at_end, FROM_TARGET, FROM_RESIDUAL)
        append(acceptance, width, b, last, last, token)
    weight = tl.load(chain.weights + b * width + last)
    emitted = tl.where(looked_at > 0, last + 1, 0)
    write_end(ends, b, tl.where(looked_at > 0, last, -1), way, step, 0, weight, emitted)
