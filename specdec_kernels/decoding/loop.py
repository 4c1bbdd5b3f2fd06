"""One direction of data: propose, target forward, verify, commit, until every row is finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec_kernels.cache import RaggedKV
from specdec_kernels.decoding.controller import Controller
from specdec_kernels.decoding.rows import Rows
from specdec_kernels.decoding.verify import Decision, Verifier
from specdec_kernels.drafting import Drafter
from specdec_kernels.metrics import Metrics
from specdec_kernels.tree import Acceptance, DraftTree

Forward = Callable[[DraftTree], Tensor]


def decode(
    forward: Forward,
    cache: RaggedKV,
    rows: Rows,
    drafter: Drafter,
    verifier: Verifier,
    controller: Controller,
    metrics: Metrics,
    max_positions: int | None = None,
) -> None:
    """Runs until `rows` are all done. `forward` maps a tree to logits [B, T, V], with the window's
    K and V written behind the prefix of `cache`.

    max_positions: the model's position limit; no draft goes beyond it.
    """
    rows.sync()
    drafter.begin(rows.tokens, rows.lens, None)
    while not all(rows.done):
        step(forward, cache, rows, drafter, verifier, controller, metrics, max_positions)


def step(
    forward: Forward,
    cache: RaggedKV,
    rows: Rows,
    drafter: Drafter,
    verifier: Verifier,
    controller: Controller,
    metrics: Metrics,
    max_positions: int | None = None,
) -> None:
    """Drafts, verifies and commits once; every unfinished row emits at least one token."""
    started = time.perf_counter()
    active = [not done for done in rows.done]
    confidence = [
        c if on else 0
        for c, on in zip(drafter.confidence(rows.tokens, rows.lens), active, strict=True)
    ]
    max_depth = [_max_depth(rows, b, max_positions) for b in range(len(rows))]
    size = min(controller.draft_size(len(rows), confidence), max(max_depth))
    tree = drafter.propose(
        rows.tokens, rows.lens, None, [(1 + size) if on else 0 for on in active], max_depth
    )
    drafted = drafted_depth(tree)
    draft_done = time.perf_counter()

    window = tree.draft_token_ids.shape[1]
    cache.reserve(max(cache.lens) + window)
    logits = forward(tree)
    verify_done = time.perf_counter()

    decision = verifier.verify(logits, tree, rows)
    sample_done = time.perf_counter()

    cache.commit(decision.path, decision.num_kept)
    rows.sync()
    drafter.commit(_acceptance(decision), None)
    commit_done = time.perf_counter()

    controller.costs.record(len(rows), window, verify_done - draft_done)
    controller.record(confidence, drafted, decision.num_accepted)
    metrics.num_steps += 1
    for b, on in enumerate(active):
        if on:
            metrics.record_row(drafted[b], min(decision.num_accepted[b], decision.num_kept[b]))
            metrics.num_new_tokens += decision.num_kept[b]
    metrics.seconds["draft"] += draft_done - started
    metrics.seconds["verify"] += verify_done - draft_done
    metrics.seconds["sample"] += sample_done - verify_done
    metrics.seconds["commit"] += commit_done - sample_done


def drafted_depth(tree: DraftTree) -> list[int]:
    """Depth of each row's tree: the most tokens that verification could accept."""
    if tree.depth is None:
        return [max(n - 1, 0) for n in tree.num_nodes.tolist()]
    return tree.depth.amax(1).tolist()


def _max_depth(rows: Rows, b: int, max_positions: int | None) -> int:
    depth = rows.left(b) - 1
    if max_positions is not None:
        depth = min(depth, max_positions - rows.length(b))
    return max(depth, 0)


def _acceptance(decision: Decision) -> Acceptance:
    num_accepted = torch.tensor(
        [min(a, k) for a, k in zip(decision.num_accepted, decision.num_kept, strict=True)],
        dtype=torch.int32,
    )
    empty = torch.full_like(decision.path, -1, dtype=torch.int64)
    return Acceptance(decision.path, num_accepted, empty, torch.zeros_like(num_accepted))
