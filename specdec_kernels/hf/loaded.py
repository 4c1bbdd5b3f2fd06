"""What outlives the runs of a head that drafts from the target's hidden states."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.hf.draft import weight_of
from specdec_kernels.hf.layers import OwnLayers


class LoadedHead(OwnLayers):
    """The switches of the head's layers, and its measured cost."""

    def __init__(self, head: nn.Module, target: PreTrainedModel, linear: str):
        super().__init__(head, linear)
        table = head.get_parameter("embed_tokens.weight")
        size = sum(p.numel() for p in head.parameters()) - table.numel()
        self.cost = DraftCost(size / max(weight_of(target), 1))
