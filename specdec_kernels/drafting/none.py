"""No drafts: every step verifies the root alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specdec_kernels.tree import ROOT_PARENT, Decision, DraftTree, SamplingParams, roots_of


class NoDrafter:
    hidden_layers: Sequence[int] = ()

    def begin(self, tokens: Tensor, lens: Tensor, features: Tensor | None) -> None:
        pass

    def confidence(self, tokens: Tensor, lens: Tensor) -> list[int]:
        return [0] * tokens.shape[0]

    def propose(
        self,
        tokens: Tensor,
        lens: Tensor,
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        max_depth: Sequence[int],
    ) -> DraftTree:
        return roots_only(tokens, lens, max_nodes)

    def commit(self, decision: Decision, features: Tensor | None) -> None:
        pass

    def end(self, tokens: Tensor, lens: Tensor) -> None:
        pass


def roots_only(tokens: Tensor, lens: Tensor, max_nodes: Sequence[int]) -> DraftTree:
    roots = roots_of(tokens, lens).tolist()
    rows = [[root] if nodes else [] for root, nodes in zip(roots, max_nodes, strict=True)]
    return DraftTree.from_lists(rows, [[ROOT_PARENT] * len(row) for row in rows])
