"""The best nodes of a tree of candidates, as a verify window."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels import native
from specdec_kernels.dispatch import register, triton_kernel
from specdec_kernels.ops._checks import expect, expect_no_grad
from specdec_kernels.ops.build_tree import reference
from specdec_kernels.tree import DraftTree

__all__ = ["build_tree"]


def build_tree(
    root_token_ids: Tensor,
    token_ids: Tensor,
    scores: Tensor,
    parents: Tensor,
    *,
    max_nodes: Tensor | int,
    width: int | None = None,
    backend: str | None = None,
) -> DraftTree:
    """Keeps the best candidates of each row, as EAGLE-2 does after expanding its tree.

    A candidate's score is its cumulative log probability: a parent's is at least its children's.
    Slots stand in descending score, equal ones in the order of the candidates; the root is slot 0.
    So the first n slots are the best tree of n nodes, parents stand before their children, and so
    do better siblings before worse ones.

    Any input gives a tree. A candidate whose score is NaN or -infinity, whose id is negative or
    whose parent is neither -1 nor an earlier candidate is dropped, and so are its descendants. One
    with a higher score than its parent counts with its parent's. Candidates of one token under one
    parent are one node, in the place of the first, with the best score and the children of all.

    Args:
        root_token_ids: the last committed token of each row, int64 [B].
        token_ids: the M candidates of each row, over all depths, int64 [B, M].
        scores: fp32 [B, M].
        parents: index of the candidate that each one hangs on, smaller than its own, -1 for the
            root, int32 [B, M].
        max_nodes: most slots to use, the root counted, int32 [B] or one number for all rows; 0 or
            less is a finished row, more than `width` counts as `width`.
        width: T, slots of the window; a number `max_nodes` is its default.
        backend: reference, cpu or triton; None picks.

    Returns:
        A DraftTree with tree_mask and depth and without draft_logits: a tree chosen by its own
        scores is deterministic (one-hot).

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.

    Equivalent to (for one row with proper scores and distinct siblings)::

        kept = sorted(range(M), key=lambda i: (-scores[i], i))[: max_nodes - 1]
        slot = {-1: 0} | {i: 1 + at for at, i in enumerate(kept)}
        draft_token_ids = [root] + [token_ids[i] for i in kept]
        window_parents = [-1] + [slot[parents[i]] for i in kept]

    Source: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees",
    2024.
    """
    op = "build_tree"
    sizes: dict[str, int] = {}
    expect(op, "token_ids", token_ids, "B, M", (torch.int64,), sizes)
    expect(op, "root_token_ids", root_token_ids, "B", (torch.int64,), sizes, token_ids)
    expect(op, "scores", scores, "B, M", (torch.float32,), sizes, token_ids)
    expect(op, "parents", parents, "B, M", (torch.int32,), sizes, token_ids)
    if isinstance(max_nodes, Tensor):
        expect(op, "max_nodes", max_nodes, "B", (torch.int32,), sizes, token_ids)
        if width is None:
            raise ValueError(f"{op}: expected width with a tensor max_nodes, got None")
    else:
        width = max(max_nodes, 1) if width is None else width
        max_nodes = parents.new_full((sizes["B"],), min(max(max_nodes, 0), width))
    if width < 1:
        raise ValueError(f"{op}: expected width of at least 1, got {width}")
    expect_no_grad(op, scores)
    return DraftTree(
        *_op(root_token_ids, token_ids, scores, parents, max_nodes, width, backend=backend or "")
    )


def _cpu(*args):
    outputs = _fake(*args)
    native.cpu.build_tree([x.contiguous() for x in args[:-1]], outputs, native.num_threads())
    return outputs


def _fake(root_token_ids, token_ids, scores, parents, max_nodes, width):
    batch = token_ids.shape[0]
    return (
        token_ids.new_empty((batch, width)),
        parents.new_empty((batch, width)),
        parents.new_empty(batch),
        token_ids.new_empty((batch, width, (width + 63) // 64)),
        parents.new_empty((batch, width)),
    )


_op = register(
    "build_tree",
    "(Tensor root_token_ids, Tensor token_ids, Tensor scores, Tensor parents, Tensor max_nodes, "
    "int width, *, str backend='') -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    # the reference comes first on a GPU until the tests of the others have run on a device
    {"cpu": _cpu, "reference": reference.build_tree, "triton": triton_kernel("build_tree")},
    _fake,
)
