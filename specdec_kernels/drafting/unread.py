"""The target's hidden states that a drafting network has yet to read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels.tree import Decision


class Unread:
    """Per row the hidden states [n] of successive tokens, in the order of the text."""

    def __init__(self, batch: int):
        self._rows: list[list[Tensor]] = [[] for _ in range(batch)]

    def begin(self, features: Tensor, lens: Sequence[int]) -> None:
        """Those [B, S, n] of prompts of `lens` tokens, and no others."""
        self._rows = [[row[:n]] for row, n in zip(features, lens, strict=True)]

    def add(self, decision: Decision, features: Tensor) -> None:
        """Those [B, T, n] of the target's window: the ones of kept slots come next."""
        for b, kept in enumerate(decision.num_kept):
            if kept:
                self._rows[b].append(features[b, decision.path[b, :kept].long()])

    def forget(self, b: int) -> None:
        """For a row that will not draft again."""
        self._rows[b] = []

    def counts(self) -> list[int]:
        return [sum(map(len, row)) for row in self._rows]

    def take(self, counts: Sequence[int], like: Tensor) -> Tensor:
        """The next counts[b] of each row [B, max(counts), n], zeros behind; dtype as `like`."""
        taken = []
        for b, n in enumerate(counts):
            if n:
                row = torch.cat(self._rows[b])
                assert len(row) >= n  # or a guess would be read as true
                taken.append((b, row[:n]))
                self._rows[b] = [row[n:]] if len(row) > n else []
        out = like.new_zeros(len(counts), max(counts), taken[0][1].shape[-1])
        for b, row in taken:
            out[b, : len(row)] = row
        return out
