"""Suffix decoding: drafts by how often what followed the text's last tokens before.

For every suffix of the text that occurred before, a draft is grown by frequency; the one with the
best expected number of accepted tokens is taken, from the row's own text or the cache of outputs.
Source: Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications",
2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specdec_kernels import native
from specdec_kernels.drafting.matches import CHANCES, CONFIDENT_LENGTHS, chance
from specdec_kernels.drafting.merging import Row, tree_of
from specdec_kernels.drafting.suffix_cache import SuffixCache
from specdec_kernels.tree import ROOT_PARENT, Decision, DraftTree, SamplingParams, roots_of

WORTH_A_SLOT = 0.02  # of a target forward is about what the verification of a token costs

Draft = tuple[list[int], list[int], list[float], float, int]


class SuffixDrafter:
    """Options are those of SpeculativeConfig; max_draft: most drafted tokens of a row.

    cache: the outputs of earlier and other runs, to which this one's are added.
    """

    hidden_layers: Sequence[int] = ()

    def __init__(
        self,
        *,
        max_depth: int,
        max_draft: int,
        max_spec_factor: float,
        min_token_prob: float,
        tree: bool,
        cache: SuffixCache | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
    ):
        self.max_depth = max_depth
        self.cache = cache
        self._options = dict(
            max_tokens=max_draft,
            factor=float(max_spec_factor),
            min_prob=float(min_token_prob),
            tree=tree,
            stop_tokens=sorted(eos_token_ids),
            chances=CHANCES,
            min_prob_beyond=WORTH_A_SLOT,
        )
        self._texts: Any = None
        self._drafts: list[Draft] = []

    def begin(self, tokens: Tensor, lens: Tensor, features: Tensor | None) -> None:
        self._drafts = []
        self._texts = native.cpu.SuffixBatch(
            tokens.shape[0],
            max_depth=self.max_depth,
            cache=None if self.cache is None else self.cache.native,
        )
        self._follow(tokens, lens)

    def confidence(self, tokens: Tensor, lens: Tensor) -> list[int]:
        """0 without a draft, else 1 + how many of CONFIDENT_LENGTHS it is as sure as."""
        if self._texts is None or self._texts.batch != tokens.shape[0]:
            self.begin(tokens, lens, None)
        else:
            self._follow(tokens, lens)
        self._drafts = self._texts.draft(**self._options)
        return [_class(draft) for draft in self._drafts]

    def propose(
        self,
        tokens: Tensor,
        lens: Tensor,
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        max_depth: Sequence[int],
    ) -> DraftTree:
        roots = roots_of(tokens, lens).tolist()
        rows = zip(roots, self._drafts, max_nodes, max_depth, strict=True)
        return tree_of([cut(*row) for row in rows], tokens.device)

    def commit(self, decision: Decision, features: Tensor | None) -> None:
        pass

    def end(self, tokens: Tensor, lens: Tensor) -> None:
        if self._texts is not None:
            self._follow(tokens, lens)
            self._texts.end()
        self._texts = None

    def _follow(self, tokens: Tensor, lens: Tensor) -> None:
        tokens, lens = tokens.cpu(), lens.cpu()
        if tokens.stride(-1) != 1:
            tokens = tokens.contiguous()
        self._texts.follow(tokens, lens.contiguous())


def _class(draft: Draft) -> int:
    tokens, _, chances, _, _ = draft
    return 1 + sum(chances[0] >= chance(n) for n in CONFIDENT_LENGTHS) if tokens else 0


def cut(root: int, draft: Draft, max_nodes: int, max_depth: int) -> Row:
    """What fits of a draft, whose first nodes are its likeliest."""
    if max_nodes < 1:
        return Row([], [], [])
    row, depths = Row([root], [ROOT_PARENT], [1.0]), [0]
    slots = {-1: 0}
    for node, (token, parent, accepted) in enumerate(zip(*draft[:3], strict=True)):
        if len(row.tokens) >= max_nodes:
            break
        above = slots.get(parent)
        if above is None or depths[above] >= max_depth:
            continue
        slots[node] = len(row.tokens)
        row.tokens.append(token)
        row.parents.append(above)
        row.chances.append(accepted)
        depths.append(depths[above] + 1)
    return row
