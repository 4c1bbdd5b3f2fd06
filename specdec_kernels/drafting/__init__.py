"""Sources of guesses, all behind one protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specdec_kernels.config import SpeculativeConfig
from specdec_kernels.drafting.ngram import NgramDrafter
from specdec_kernels.drafting.none import NoDrafter
from specdec_kernels.drafting.suffix import SuffixDrafter
from specdec_kernels.drafting.suffix_cache import SuffixCache, expect_kernels
from specdec_kernels.tree import Decision, DraftTree, SamplingParams

__all__ = [
    "Drafter",
    "NgramDrafter",
    "NoDrafter",
    "SuffixCache",
    "SuffixDrafter",
    "make_drafter",
    "make_suffix_cache",
]


class Drafter(Protocol):
    """Guesses tokens for every row of a batch.

    Token tensors are int32 [B, S] without padding on the left, lens int32 [B]; the last token of a
    row is the root of its tree.
    """

    hidden_layers: Sequence[int]  # outputs of these target layers arrive as `features`

    def begin(self, tokens: Tensor, lens: Tensor, features: Tensor | None) -> None:
        """A new batch; `tokens` holds the prompts and the token sampled from prefill."""

    def confidence(self, tokens: Tensor, lens: Tensor) -> list[int]:
        """One class per row, higher is surer; 0 means that the row can have no draft."""

    def propose(
        self,
        tokens: Tensor,
        lens: Tensor,
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        max_depth: Sequence[int],
    ) -> DraftTree:
        """A tree of at most max_nodes[b] nodes (the root counted) and max_depth[b] levels below it.

        max_nodes[b] = 0 asks for a finished row.
        """

    def commit(self, decision: Decision, features: Tensor | None) -> None:
        """What became of the last proposal."""

    def end(self, tokens: Tensor, lens: Tensor) -> None:
        """Every row is finished; `tokens` holds the texts whole."""


def make_suffix_cache(config: SpeculativeConfig, vocab_size: int) -> SuffixCache | None:
    """What the runs of one model share; None when `config` wants none.

    Raises ImportError when the method needs compiled kernels that are missing.
    """
    if config.method == "suffix":
        expect_kernels()
    if not config.keeps_outputs:
        return None
    return SuffixCache(
        max_depth=config.suffix_decoding_max_tree_depth,
        max_requests=config.suffix_decoding_max_cached_requests,
        max_tokens=config.suffix_decoding_max_cached_tokens,
        vocab_size=vocab_size,
    )


def make_drafter(
    config: SpeculativeConfig,
    eos_token_ids: frozenset[int],
    suffix_cache: SuffixCache | None = None,
) -> Drafter:
    """The drafter of one run; rule `block` gets chains."""
    if config.method == "none":
        return NoDrafter()
    max_draft = config.num_speculative_tokens or config.max_speculative_tokens
    if config.method == "suffix":
        return SuffixDrafter(
            max_depth=config.suffix_decoding_max_tree_depth,
            max_draft=max_draft,
            max_spec_factor=config.suffix_decoding_max_spec_factor,
            min_token_prob=config.suffix_decoding_min_token_prob,
            tree=config.suffix_trees,
            cache=suffix_cache,
            eos_token_ids=eos_token_ids,
        )
    return NgramDrafter(
        min_n=config.prompt_lookup_min,
        max_n=config.prompt_lookup_max,
        num_matches=config.matches_in_draft,
        max_draft=max_draft,
        eos_token_ids=eos_token_ids,
    )
