"""Sources of guesses, all behind one protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specdec_kernels.tree import Decision, DraftTree, SamplingParams

CLASSES = 4  # of confidence that a drafter distinguishes
CLASS_CHANCES = (0.3, 0.55, 0.75, 0.9)  # that the next drafted token is right, until it is known


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
        """One class per row up to CLASSES, higher is surer; 0: the row can have no draft.

        Combined drafters number theirs on: CLASSES for the first one, as many for the next.
        """

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
        """What became of the last proposal; features [B, T, n], slot i that of node i.

        A drafter with hidden layers may be given slots behind its tree: what others drafted.
        """

    def end(self, tokens: Tensor, lens: Tensor) -> None:
        """Every row is finished; `tokens` holds the texts whole."""
