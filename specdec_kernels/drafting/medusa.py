"""Medusa heads draft: small networks on the target's last hidden state, one per further token.

The hidden state behind which the target chose the root is the newest there is: head 0 guesses the
token behind the root, head 1 the one after that. The heads do not see each other's tokens.
Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads", 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from specdec_kernels.drafting.acceptance import SlotAcceptance
from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.drafting.marginals import MarginalDrafter
from specdec_kernels.tree import Decision


@runtime_checkable
class Heads(Protocol):
    """The heads of one target.

    number: how many. hidden_layer: id of the hidden state that they read. cost, acceptance: learnt
    while decoding; they outlive the runs.
    """

    number: int
    hidden_layer: int
    cost: DraftCost
    acceptance: SlotAcceptance

    def logits(self, states: Tensor, levels: int) -> list[Tensor]:
        """Of the first `levels` heads: [B, V] each, from states [B, d]."""


class MedusaDrafter(MarginalDrafter):
    """options: those of MarginalDrafter."""

    def __init__(self, heads: Heads, **options: Any):
        super().__init__(heads, **options)
        self.heads = heads
        self.hidden_layers = (heads.hidden_layer,)
        self._states: Tensor | None = None  # [B, d], behind which the roots were chosen

    def begin(self, tokens: Tensor, lens: Tensor, features: Tensor | None) -> None:
        assert features is not None
        self._states = _rows(features, lens.long() - 2)

    def commit(self, decision: Decision, features: Tensor | None) -> None:
        assert features is not None
        last = torch.tensor(decision.num_kept, device=features.device).clamp(min=1) - 1
        slots = decision.path.gather(1, last[:, None]).flatten().long()
        self._states = _rows(features, slots.clamp(min=0))
        self.learn(decision)

    def _guess(self, roots: Tensor, depths: Sequence[int]) -> list[Tensor]:
        assert self._states is not None
        return self.heads.logits(self._states, max(depths))


def _rows(features: Tensor, slots: Tensor) -> Tensor:
    """[B, d]: one slot of each row of [B, T, d]."""
    return features[torch.arange(len(features), device=features.device), slots]
