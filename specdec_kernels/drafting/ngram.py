"""Prompt lookup: the text's own last n-gram, found earlier, is assumed to continue as it did there.

Several matches are merged into one tree, the longest and latest match first.
Source: A. Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specdec_kernels.ops.ngram_lookup import ngram_lookup
from specdec_kernels.tree import ROOT_PARENT, Decision, DraftTree, SamplingParams

CONFIDENT_LENGTHS = (2, 4, 8)


class NgramDrafter:
    hidden_layers: Sequence[int] = ()

    def __init__(
        self,
        *,
        min_n: int,
        max_n: int,
        num_matches: int,
        max_draft: int,
        eos_token_ids: frozenset[int] = frozenset(),
    ):
        self.min_n = min_n
        self.max_n = max_n
        self.num_matches = num_matches
        self.max_draft = max_draft
        self.eos_token_ids = eos_token_ids
        self._found: list[list[list[int]]] = []

    def begin(self, tokens: Tensor, lens: Tensor, features: Tensor | None) -> None:
        self._found = []

    def confidence(self, tokens: Tensor, lens: Tensor) -> list[int]:
        """0 without a match, else 1 + how many of CONFIDENT_LENGTHS the longest match reaches."""
        ids, num = ngram_lookup(
            tokens,
            lens,
            min_n=self.min_n,
            max_n=self.max_n,
            k=self.max_draft,
            num_matches=self.num_matches,
        )
        self._found = [
            [self._until_eos(draft[:n]) for draft, n in zip(row, counts, strict=True) if n]
            for row, counts in zip(ids.tolist(), num.tolist(), strict=True)
        ]
        classes = [int(bool(found)) for found in self._found]
        for length in CONFIDENT_LENGTHS:
            if length > self.max_n or not any(classes):
                break
            longer = max(length, self.min_n)
            _, num = ngram_lookup(tokens, lens, min_n=longer, max_n=longer, k=1)
            reached = num.flatten().tolist()
            if not any(reached):
                break
            classes = [c + int(n > 0) for c, n in zip(classes, reached, strict=True)]
        return classes

    def propose(
        self,
        tokens: Tensor,
        lens: Tensor,
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        max_depth: Sequence[int],
    ) -> DraftTree:
        roots = tokens.gather(1, (lens.long() - 1)[:, None]).flatten().tolist()
        trees = [
            merge(root, found, nodes, depth)
            for root, found, nodes, depth in zip(
                roots, self._found, max_nodes, max_depth, strict=True
            )
        ]
        return DraftTree.from_lists([t[0] for t in trees], [t[1] for t in trees])

    def commit(self, decision: Decision, features: Tensor | None) -> None:
        pass

    def _until_eos(self, draft: list[int]) -> list[int]:
        for i, token in enumerate(draft):
            if token in self.eos_token_ids:
                return draft[: i + 1]
        return draft


def merge(
    root: int, drafts: Sequence[Sequence[int]], max_nodes: int, max_depth: int
) -> tuple[list[int], list[int]]:
    """Merges continuations of `root` into a trie; returns its tokens and parents in slot order.

    The first draft takes the budget it needs; each further one may use up to a quarter of what the
    first was offered, since it only pays where the texts part.
    """
    if max_nodes < 1:
        return [], []
    tokens, parents = [root], [ROOT_PARENT]
    children: dict[tuple[int, int], int] = {}
    branch = max(1, (max_nodes - 1) // 4)
    reserved = branch * min(len(drafts) - 1, 2) if max_nodes > 4 else 0
    for rank, draft in enumerate(drafts):
        limit = max_nodes - reserved if rank == 0 else min(max_nodes, len(tokens) + branch)
        node = 0
        for token in draft[:max_depth]:
            child = children.get((node, token))
            if child is None:
                if len(tokens) >= limit:
                    break
                child = children[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = child
    return tokens, parents
