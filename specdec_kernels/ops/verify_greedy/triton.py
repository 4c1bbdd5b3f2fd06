"""verify_greedy in Triton: one pass over the nodes' rows, then one program per batch row walks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.ops._triton import launch
from specdec_kernels.ops._triton_extremes import Cuts, find_extremes, greedy_token
from specdec_kernels.ops._triton_logits import Edits, Logits, Window, nodes_of
from specdec_kernels.ops._triton_walk import append, child_with_token, finish_row
from specdec_kernels.ops.verify_greedy import new_acceptance
from specdec_kernels.tree import Acceptance


def verify_greedy(
    logits: Tensor, draft_token_ids: Tensor, parents: Tensor, num_nodes: Tensor
) -> tuple[Tensor, ...]:
    """Two launches. Reads the rows of nodes once; all else is 12 bytes per piece of a row."""
    outputs = Acceptance(*new_acceptance(draft_token_ids))
    rows = Logits.of(logits)
    window = Window(*(x.contiguous() for x in (draft_token_ids, parents, num_nodes)))
    cuts = Cuts.of(rows)
    extremes = find_extremes(rows, Edits(), window, cuts, keeps_maxima=False)
    launch(
        _walk_greedy_kernel,
        (logits.shape[0],),
        logits,
        rows,
        Edits(),
        window,
        cuts,
        extremes,
        outputs,
        WIDTH=triton.next_power_of_2(rows.width),
        num_warps=4,
    )
    return tuple(outputs)


@triton.jit
def _walk_greedy_kernel(
    logits,
    edits,
    window,
    cuts,
    extremes,
    acceptance,
    WIDTH: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    width = logits.width
    nodes = nodes_of(window, width, b)
    slot = tl.where(nodes > 0, 0, -1)
    length = nodes * 0
    status = nodes * 0
    while slot >= 0:
        row = b * width + slot
        token, bits, _ = greedy_token(logits, edits, window, cuts, extremes, row, b, slot)
        append(acceptance, width, b, length, slot, token)
        status |= bits
        length += 1
        slot = child_with_token(window, width, b, nodes, slot, token, WIDTH)
    tl.store(acceptance.status + b, status)
    finish_row(acceptance, width, b, length, WIDTH)
