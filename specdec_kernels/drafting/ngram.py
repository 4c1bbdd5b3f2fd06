"""Prompt lookup: the text's own last n-gram, found earlier, is assumed to continue as it did there.

Several matches are merged into one tree, the longest and latest match first.
Source: A. Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specdec_kernels.drafting.search import Search, make_search
from specdec_kernels.tree import ROOT_PARENT, Decision, DraftTree, SamplingParams, roots_of

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
        self._search: Search | None = None
        self._found: list[list[list[int]]] = []

    def begin(self, tokens: Tensor, lens: Tensor, features: Tensor | None) -> None:
        self._found = []
        self._search = self._new_search(tokens)
        self._search.begin(tokens, lens)

    def confidence(self, tokens: Tensor, lens: Tensor) -> list[int]:
        """0 without a match, else 1 + how many of CONFIDENT_LENGTHS the longest match reaches."""
        if self._search is None:
            self._search = self._new_search(tokens)
        drafts, lengths = self._search.find(tokens, lens)
        self._found = [[self._until_eos(draft) for draft in row] for row in drafts]
        usual = [length for length in CONFIDENT_LENGTHS if length <= self.max_n]
        return [int(n > 0) + sum(n >= length for length in usual) for n in lengths]

    def propose(
        self,
        tokens: Tensor,
        lens: Tensor,
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        max_depth: Sequence[int],
    ) -> DraftTree:
        roots = roots_of(tokens, lens).tolist()
        trees = [
            merge(root, found, nodes, depth)
            for root, found, nodes, depth in zip(
                roots, self._found, max_nodes, max_depth, strict=True
            )
        ]
        return DraftTree.from_lists([t[0] for t in trees], [t[1] for t in trees])

    def commit(self, decision: Decision, features: Tensor | None) -> None:
        pass

    def end(self, tokens: Tensor, lens: Tensor) -> None:
        pass

    def _new_search(self, tokens: Tensor) -> Search:
        return make_search(
            tokens.device.type,
            min_n=self.min_n,
            max_n=self.max_n,
            k=self.max_draft,
            num_matches=self.num_matches,
            lengths=CONFIDENT_LENGTHS,
        )

    def _until_eos(self, draft: list[int]) -> list[int]:
        if self.eos_token_ids.isdisjoint(draft):
            return draft
        end = next(i for i, token in enumerate(draft) if token in self.eos_token_ids)
        return draft[: end + 1]


def merge(
    root: int, drafts: Sequence[Sequence[int]], max_nodes: int, max_depth: int
) -> tuple[list[int], list[int]]:
    """Merges continuations of `root` into a trie; returns its tokens and parents in slot order.

    The first draft gets all but a few nodes, which are kept for the tokens where further ones part
    from it: measured on copied, quoted and free text, longer branches cost more than they bring.
    """
    if max_nodes < 1:
        return [], []
    tokens, parents = [root], [ROOT_PARENT]
    children: dict[tuple[int, int], int] = {}
    branch = max(1, min(2, (max_nodes - 1) // 4))
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
