"""Accepts the drafted tokens that equal the target's argmax."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels import native
from specdec_kernels.dispatch import register, triton_kernel
from specdec_kernels.ops._checks import FLOATS, expect, expect_no_grad
from specdec_kernels.ops.sample import dense_rows, expect_vocabulary
from specdec_kernels.ops.verify_greedy import reference
from specdec_kernels.tree import Acceptance

__all__ = ["verify_greedy"]


def verify_greedy(
    logits: Tensor,
    draft_token_ids: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    *,
    backend: str | None = None,
) -> Acceptance:
    """From the root, follows the child whose token is the argmax at its parent, to the bonus token.

    Ties go to the lowest id. A row with NaN sets STATUS_NAN and takes its largest finite logit (or
    token 0); a row of -infinity sets STATUS_EMPTY and takes token 0. Only the rows on the accepted
    path set a status. Padding slots and finished rows are never read.

    Args:
        logits: raw target logits [B, T, V], fp32, bf16 or fp16.
        draft_token_ids: the verify window, root first, int64 [B, T]; an id outside the vocabulary
            is rejected.
        parents: parent slot of each slot, smaller than the slot, int32 [B, T].
        num_nodes: slots in use, the root counted, int32 [B]; 0 is a finished row.
        backend: reference, cpu, triton or cuda; None picks.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.

    Equivalent to (a chain without padding, B = 1)::

        target = logits[0].argmax(-1)
        num_accepted = (draft_token_ids[0, 1:] == target[:-1]).int().cumprod(0).sum()
        output_token_ids = target[: num_accepted + 1]
    """
    op = "verify_greedy"
    sizes: dict[str, int] = {}
    expect(op, "logits", logits, "B, T, V", FLOATS, sizes)
    expect_vocabulary(op, logits)
    expect_window(op, draft_token_ids, parents, num_nodes, sizes, logits)
    expect_no_grad(op, logits)
    return Acceptance(
        *_op(dense_rows(logits), draft_token_ids, parents, num_nodes, backend=backend or "")
    )


def expect_window(
    op: str,
    draft_token_ids: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    sizes: dict[str, int],
    like: Tensor,
) -> None:
    """Checks the arguments that describe a verify window."""
    expect(op, "draft_token_ids", draft_token_ids, "B, T", (torch.int64,), sizes, like)
    expect(op, "parents", parents, "B, T", (torch.int32,), sizes, like)
    expect(op, "num_nodes", num_nodes, "B", (torch.int32,), sizes, like)
    if sizes["T"] == 0:
        raise ValueError(f"{op}: expected a verify window of at least one slot, got none")


def new_acceptance(draft_token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unfilled outputs, in the order of Acceptance."""
    batch, width = draft_token_ids.shape
    return (
        draft_token_ids.new_empty(batch, width, dtype=torch.int32),
        draft_token_ids.new_empty(batch, dtype=torch.int32),
        draft_token_ids.new_empty(batch, width),
        draft_token_ids.new_empty(batch, dtype=torch.int32),
    )


def _cpu(logits, draft_token_ids, parents, num_nodes):
    outputs = new_acceptance(draft_token_ids)
    window = [x.contiguous() for x in (draft_token_ids, parents, num_nodes)]
    native.cpu.verify_greedy(logits, window, outputs, native.num_threads())
    return outputs


def _cuda(logits, draft_token_ids, parents, num_nodes):
    outputs = new_acceptance(draft_token_ids)
    window = [x.contiguous() for x in (draft_token_ids, parents, num_nodes)]
    batch, width = draft_token_ids.shape
    workspace = draft_token_ids.new_zeros(batch * (2 * width + 1))
    native.cuda.verify_greedy(logits, window, outputs, workspace, *native.cuda_launch(logits))
    return outputs


def _reference(logits, draft_token_ids, parents, num_nodes):
    return tuple(reference.verify_greedy(logits, draft_token_ids, parents, num_nodes))


def _fake(logits, draft_token_ids, parents, num_nodes):
    return new_acceptance(draft_token_ids)


_op = register(
    "verify_greedy",
    "(Tensor logits, Tensor draft_token_ids, Tensor parents, Tensor num_nodes, "
    "*, str backend='') -> (Tensor, Tensor, Tensor, Tensor)",
    # a GPU path becomes the default of CUDA tensors once its tests have run on a device
    {
        "cpu": _cpu,
        "reference": _reference,
        "triton": triton_kernel("verify_greedy"),
        "cuda": _cuda,
    },
    _fake,
)
