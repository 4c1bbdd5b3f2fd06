"""Prompt lookup: the text's own last n-gram, found earlier, is assumed to continue as it did there.

Several matches are merged into one tree, of the tokens that are likeliest to be accepted.
Source: A. Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specdec_kernels.drafting.matches import CONFIDENT_LENGTHS, chance
from specdec_kernels.drafting.merging import Row, Trie, tree_of
from specdec_kernels.drafting.search import Search, make_search
from specdec_kernels.tree import Decision, DraftTree, SamplingParams, roots_of

PARTING_CHANCE = 0.13  # that a further match is right where it parts from those before


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
        self._lengths: list[int] = []

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
        usual = (1, *(length for length in CONFIDENT_LENGTHS if length <= self.max_n))
        classes = [sum(n >= length for length in usual) for n in lengths]
        self._lengths = [usual[max(c, 1) - 1] for c in classes]
        return classes

    def propose(
        self,
        tokens: Tensor,
        lens: Tensor,
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        max_depth: Sequence[int],
    ) -> DraftTree:
        roots = roots_of(tokens, lens).tolist()
        rows = zip(roots, self._found, self._lengths, max_nodes, max_depth, strict=True)
        return tree_of([merge(*row) for row in rows], tokens.device)

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
    root: int, drafts: Sequence[Sequence[int]], length: int, max_nodes: int, max_depth: int
) -> Row:
    """Merges continuations of `root`, the best first, behind matches of about `length` tokens."""
    trie, deepest, least = Trie(root), max(min(max_depth, max_nodes - 1), 0), 0.0
    for draft in drafts:
        node, path = 0, 1.0
        for j, token in enumerate(draft[:deepest]):
            child = trie.find(node, token)
            if child is None:
                right = chance(length + j) if trie.is_leaf(node) else PARTING_CHANCE
                if path * right <= least:
                    break
                child = trie.put(node, token, right)
            node = child
            path *= trie.given[node]
        if node == max_nodes - 1:  # the first draft fills the room: what is less likely has none
            least = path
    return trie.cut(max_nodes)[0]
