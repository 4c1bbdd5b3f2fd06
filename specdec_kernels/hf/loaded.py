"""What outlives the runs of a head that drafts from the target's hidden states."""

from __future__ import annotations

import contextlib

from torch import nn
from transformers import PreTrainedModel

from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.hf.draft import weight_of
from specdec_kernels.hf.forwards import MAX_ROWS
from specdec_kernels.hf.layers import LayerFlip


class LoadedHead:
    """The head's measured cost, and the switches of its layers."""

    def __init__(self, head: nn.Module, target: PreTrainedModel, linear: str):
        self.layers = None if linear == "off" else LayerFlip(head)
        table = head.get_parameter("embed_tokens.weight")
        size = sum(p.numel() for p in head.parameters()) - table.numel()
        self.cost = DraftCost(size / max(weight_of(target), 1))

    def around(self, rows: int) -> contextlib.AbstractContextManager[None]:
        if self.layers is None:
            return contextlib.nullcontext()
        return self.layers.verify(rows) if rows <= MAX_ROWS else self.layers.prefill()

    def hold(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.layers is None else self.layers.hold()
