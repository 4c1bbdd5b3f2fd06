"""rejection_sample in Triton: what all rules share, and `coupled`.

The rows of nodes are prepared as in `sample`, all at once. `coupled` draws at every node and walks;
the others walk by probabilities of single tokens, from masses of whole rows, and draw one token at
the end.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.ops._random import BONUS
from specdec_kernels.ops._triton import launch
from specdec_kernels.ops._triton_batch import Batch
from specdec_kernels.ops._triton_draw import draw
from specdec_kernels.ops._triton_extremes import Filters, best_key
from specdec_kernels.ops._triton_filters import prepare
from specdec_kernels.ops._triton_logits import Edits, Window, nodes_of
from specdec_kernels.ops._triton_numerics import pair_index
from specdec_kernels.ops._triton_walk import append, child_with_token, finish_row
from specdec_kernels.ops.rejection_sample import reference
from specdec_kernels.ops.rejection_sample._triton_block import walk_block
from specdec_kernels.ops.rejection_sample._triton_case import make_case, window_width
from specdec_kernels.ops.rejection_sample._triton_end import emit
from specdec_kernels.ops.rejection_sample._triton_recursive import walk_recursive
from specdec_kernels.ops.rejection_sample._triton_typical import walk_typical
from specdec_kernels.ops.verify_greedy import new_acceptance
from specdec_kernels.tree import Acceptance, SamplingParams


def rejection_sample(
    target_logits: Tensor, draft_token_ids: Tensor, parents: Tensor, num_nodes: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    """`coupled`: five launches. Reads the rows of nodes once, and tiles that could win once more.
    The others: eight to twelve. Read the rows of nodes once, those with children (and their draft
    rows) once more, `block` and `typical` twice, and the last row once more. On trees `recursive`
    reads a row and its draft row again for every rejected sibling but the last, in one program.

    On CUDA tensors nothing is read by the host, and a tree under a rule for chains is no error:
    `block` follows it up to its first branching, `token` verifies it as `recursive`.
    """
    *fields, draft_logits, vocab_map, rule, threshold, alpha = args
    sampling, rule = SamplingParams(*fields), reference.resolve(rule, draft_logits)
    if not parents.is_cuda:
        reference.expect_chains(rule, parents, num_nodes, draft_logits is not None)
    acceptance = Acceptance(*new_acceptance(draft_token_ids))
    window = Window(*(x.contiguous() for x in (draft_token_ids, parents, num_nodes)))
    filters = Filters(*(x.contiguous() for x in sampling[:4]))
    target = prepare(target_logits, Edits.of(sampling.edits), window, filters)
    if rule == "coupled":
        _walk_coupled(target, draw(target, sampling.seed, sampling.position, BONUS), acceptance)
        return tuple(acceptance)
    draft = None if draft_logits is None else _prepare_draft(draft_logits, window)
    case = make_case(target, draft, vocab_map, sampling)
    sums = None
    if rule == "block":
        ends = walk_block(case, acceptance)
    elif rule == "typical":
        ends = walk_typical(case, acceptance, threshold, alpha)
    else:
        ends, sums = walk_recursive(case, acceptance)
    emit(case, ends, sums, acceptance, is_block=rule == "block")
    return tuple(acceptance)


def _prepare_draft(draft_logits: Tensor, window: Window) -> Batch:
    """The last slot in use has no children, so that its row is not read."""
    assert window.num_nodes is not None
    window = window._replace(num_nodes=window.num_nodes - 1)
    ones = draft_logits.new_ones(draft_logits.shape[0], dtype=torch.float32)
    return prepare(draft_logits, Edits(), window, Filters(ones))


def _walk_coupled(batch: Batch, keys: Tensor, acceptance: Acceptance) -> None:
    grid, width = (keys.shape[0] // batch.logits.width,), window_width(batch)
    launch(_walk_coupled_kernel, grid, keys, batch, keys, acceptance, WIDTH=width, num_warps=1)


@triton.jit
def _walk_coupled_kernel(batch, keys_ptr, acceptance, WIDTH: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    width = batch.logits.width
    nodes = nodes_of(batch.window, width, b)
    slot = tl.where(nodes > 0, 0, -1)
    length = nodes * 0
    status = nodes * 0
    while slot >= 0:
        row = b * width + slot
        token = tl.load(batch.rows.tokens + row)
        status |= tl.load(batch.rows.status + row)
        if token < 0:
            token = pair_index(best_key(keys_ptr, row, batch.cuts))
        append(acceptance, width, b, length, slot, token)
        length += 1
        slot = child_with_token(batch.window, width, b, nodes, slot, token, WIDTH)
    tl.store(acceptance.status + b, status)
    finish_row(acceptance, width, b, length, WIDTH)
