"""Sources of guesses, all behind one protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from specdec_kernels.config import SpeculativeConfig
from specdec_kernels.drafting.draft_model import DraftModel, DraftModelDrafter
from specdec_kernels.drafting.eagle import EagleDrafter, HeadRun
from specdec_kernels.drafting.medusa import Heads, MedusaDrafter
from specdec_kernels.drafting.ngram import NgramDrafter
from specdec_kernels.drafting.none import NoDrafter
from specdec_kernels.tree import Decision, DraftTree, SamplingParams

__all__ = [
    "DraftModel",
    "DraftModelDrafter",
    "Drafter",
    "EagleDrafter",
    "HeadRun",
    "Heads",
    "MedusaDrafter",
    "NgramDrafter",
    "NoDrafter",
    "make_drafter",
]


class Drafter(Protocol):
    """Guesses tokens for every row of a batch.

    Token tensors are int32 [B, S] without padding on the left, lens int32 [B]; the last token of a
    row is the root of its tree.

    hidden_layers: the hidden states of the target that arrive as `features`, side by side in this
        order; None arrives where it is empty. Ids count as transformers' `hidden_states` do: k is
        what layer k reads, the number of layers what the last one gives after the final norm.
    """

    hidden_layers: Sequence[int]

    def begin(self, tokens: Tensor, lens: Tensor, features: Tensor | None) -> None:
        """A new batch; `tokens` holds the prompts and the token sampled from prefill.

        features: [B, S, n] of the prompts, slot i that of token i.
        """

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
        """What became of the last proposal; features [B, T, n], slot i that of node i."""


def make_drafter(
    config: SpeculativeConfig,
    eos_token_ids: frozenset[int],
    model: DraftModel | HeadRun | Heads | None = None,
) -> Drafter:
    """The drafter of one run; rule `block` gets chains.

    model: drafts under the methods "draft_model", "eagle", "eagle3" and "medusa".
    """
    if config.method == "none":
        return NoDrafter()
    if model is not None:
        options: dict[str, Any] = dict(
            topk=config.children_in_draft,
            min_tokens=config.draft_min_tokens,
            p_min=config.draft_p_min,
            eos_token_ids=eos_token_ids,
        )
        if isinstance(model, Heads):
            return MedusaDrafter(model, choices=config.medusa_choices, **options)
        options |= dict(
            rule=config.rule,
            probabilistic=config.draft_sample_method == "probabilistic",
            depth=config.draft_tree_depth,
        )
        if isinstance(model, HeadRun):
            return EagleDrafter(model, **options)
        return DraftModelDrafter(model, **options)
    return NgramDrafter(
        min_n=config.prompt_lookup_min,
        max_n=config.prompt_lookup_max,
        num_matches=config.matches_in_draft,
        max_draft=config.num_speculative_tokens or config.max_speculative_tokens,
        eos_token_ids=eos_token_ids,
    )
