"""Drafts that are right as often as one wants, to measure what drafting costs and brings.

The first run of a prompt only writes down what it emits. Later runs of it draft from that, each
token right with a given chance and wrong otherwise, at no cost.
"""

from __future__ import annotations

import random
import threading
from bisect import bisect
from collections.abc import Sequence

from torch import Tensor

from specdec_kernels.drafting import CLASS_CHANCES
from specdec_kernels.drafting.none import roots_only
from specdec_kernels.tree import ROOT_PARENT, Decision, DraftTree, SamplingParams

Text = tuple[int, ...]


class Recorded:
    """What followed each text with which a run began, the newest `most` of them."""

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._followed: dict[Text, list[int]] = {}

    def add(self, beginning: Text, followed: list[int]) -> None:
        """Kept unless a longer text is known."""
        with self._lock:
            if len(followed) >= len(self._followed.get(beginning, ())):
                self._followed.pop(beginning, None)
                self._followed[beginning] = followed
            while len(self._followed) > self._most:
                del self._followed[next(iter(self._followed))]

    def after(self, beginning: Text) -> list[int]:
        with self._lock:
            return self._followed.get(beginning, [])


class SyntheticDrafter:
    """Chains in which every token is right with `acceptance_rate`, by coins that `seed` fixes."""

    hidden_layers: Sequence[int] = ()

    def __init__(self, recorded: Recorded, acceptance_rate: float, max_draft: int, seed: int = 0):
        self.recorded = recorded
        self.acceptance_rate = acceptance_rate
        self.max_draft = max_draft
        self.surety = max(bisect(CLASS_CHANCES, acceptance_rate), 1)
        self._coins = random.Random(seed)
        self._beginnings: list[Text] = []
        self._texts: list[list[int]] = []

    def begin(self, tokens: Tensor, lens: Tensor, features: Tensor | None) -> None:
        self._beginnings = [tuple(row) for row in _rows(tokens, lens)]
        self._texts = [[*start, *self.recorded.after(start)] for start in self._beginnings]

    def confidence(self, tokens: Tensor, lens: Tensor) -> list[int]:
        return [self.surety if ahead else 0 for ahead in self._ahead(tokens, lens)]

    def propose(
        self,
        tokens: Tensor,
        lens: Tensor,
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        max_depth: Sequence[int],
    ) -> DraftTree:
        drafts = []
        for ahead, nodes, depth in zip(
            self._ahead(tokens, lens), max_nodes, max_depth, strict=True
        ):
            size = min(nodes - 1, depth, self.max_draft)
            drafts.append([self._perhaps(token) for token in ahead[: max(size, 0)]])
        roots = roots_only(tokens, lens, max_nodes).draft_token_ids[:, 0].tolist()
        rows = [
            [root, *draft] if nodes else []
            for root, draft, nodes in zip(roots, drafts, max_nodes, strict=True)
        ]
        return DraftTree.from_lists(
            rows, [[ROOT_PARENT, *range(len(row) - 1)][: len(row)] for row in rows]
        )

    def commit(self, decision: Decision, features: Tensor | None) -> None:
        pass

    def end(self, tokens: Tensor, lens: Tensor) -> None:
        for start, text in zip(self._beginnings, _rows(tokens, lens), strict=True):
            self.recorded.add(start, text[len(start) :])

    def _ahead(self, tokens: Tensor, lens: Tensor) -> list[list[int]]:
        """What followed each row the last time, empty where that ended or was another text."""
        return [
            known[len(text) :] if known[: len(text)] == text else []
            for known, text in zip(self._texts, _rows(tokens, lens), strict=True)
        ]

    def _perhaps(self, token: int) -> int:
        """The token, or one of its neighbours."""
        if self._coins.random() < self.acceptance_rate:
            return token
        return token - 1 if token else 1


def _rows(tokens: Tensor, lens: Tensor) -> list[list[int]]:
    return [row[:n] for row, n in zip(tokens.tolist(), lens.tolist(), strict=True)]
