"""One direction of data: propose, target forward, verify, commit, until every row is finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec_kernels.cache import RaggedKV
from specdec_kernels.decoding.controller import Controller
from specdec_kernels.decoding.rows import Rows
from specdec_kernels.decoding.verify import Decision, Verifier
from specdec_kernels.drafting import Drafter
from specdec_kernels.metrics import Metrics
from specdec_kernels.tree import DraftTree


@dataclass
class Loop:
    """Everything that one generation needs.

    forward: maps a tree to logits [B, T, V] and the features [B, T, n] that the drafter wants, or
        None, with the window's K and V written behind the prefix.
    max_positions: the model's position limit; no draft goes beyond it.
    features: of the prompts, [B, S, n].
    requests: counts of each row alone, where they are wanted.
    prepared: whether the last forward did work that later ones of its width need not do; what it
        took says nothing about them.
    """

    forward: Callable[[DraftTree], tuple[Tensor, Tensor | None]]
    cache: RaggedKV
    rows: Rows
    drafter: Drafter
    verifier: Verifier
    controller: Controller
    metrics: Metrics
    max_positions: int | None = None
    features: Tensor | None = None
    requests: Sequence[Metrics] = ()
    prepared: Callable[[], bool] = lambda: False

    def run(self) -> None:
        """Steps until every row is finished."""
        self.rows.sync()
        self.drafter.begin(self.rows.tokens, self.rows.lens, self.features)
        while not all(self.rows.done):
            self.step()
        self.drafter.end(self.rows.tokens, self.rows.lens)

    def step(self) -> None:
        """Drafts, verifies and commits once; every unfinished row emits at least one token."""
        seconds = self.metrics.seconds
        active = [not done for done in self.rows.done]

        started = time.perf_counter()
        confidence, tree = self.propose(active)
        self.cache.reserve(max(self.cache.lens) + tree.width)
        seconds["draft"] += _since(started)

        started = time.perf_counter()
        logits, features = self.forward(tree)
        seconds["verify"] += (forward_seconds := _since(started))

        decision = self.verifier.verify(logits, tree, self.rows)
        decided_seconds = _since(started)
        seconds["sample"] += decided_seconds - forward_seconds

        started = time.perf_counter()
        self.cache.commit(decision.path, decision.num_kept)
        self.rows.sync()
        self.drafter.commit(decision, features)
        seconds["commit"] += _since(started)

        if not self.prepared():
            # Another device has only been told what to do until the decision is read from it.
            spent = forward_seconds if logits.is_cpu else decided_seconds
            self.controller.costs.record(len(active), tree.width, spent)
        self.record(active, confidence, tree, decision)

    def propose(self, active: list[bool]) -> tuple[list[int], DraftTree]:
        """The drafter's confidence per row, and a tree of the size that the controller chose."""
        rows = self.rows
        classes = self.drafter.confidence(rows.tokens, rows.lens)
        confidence = [c if on else 0 for c, on in zip(classes, active, strict=True)]
        max_depth = [self._max_depth(b) for b in range(len(rows))]
        wanted = self.controller.draft_size(len(rows), confidence, sum(active))
        size = min(wanted, max(max_depth))
        max_nodes = [1 + size if on else 0 for on in active]
        tree = self.drafter.propose(
            rows.tokens, rows.lens, self.verifier.at(rows), max_nodes, max_depth
        )
        return confidence, tree

    def record(
        self, active: list[bool], confidence: list[int], tree: DraftTree, decision: Decision
    ) -> None:
        drafted = tree.drafted_depth()
        self.controller.record(confidence, drafted, decision.num_accepted)
        self.metrics.num_steps += 1
        for b, on in enumerate(active):
            if on:
                kept = decision.num_kept[b]
                for metrics in (self.metrics, *self.requests[b : b + 1]):
                    metrics.record_row(drafted[b], min(decision.num_accepted[b], kept))
                    metrics.num_new_tokens += kept

    def _max_depth(self, b: int) -> int:
        """Levels below the root that row b can use: tokens left and positions left, less one."""
        depth = self.rows.left(b) - 1
        if self.max_positions is not None:
            depth = min(depth, self.max_positions - self.rows.length(b))
        return max(depth, 0)


def _since(started: float) -> float:
    return time.perf_counter() - started
