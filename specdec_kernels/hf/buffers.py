"""The verify window in tensors that stay, of few widths, for what is recorded or compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.cache import RaggedKV
from specdec_kernels.tree import DraftTree


def bucket_of(width: int) -> int:
    """Slots of the window that stands for one of `width`: the next power of two."""
    return 1 << (width - 1).bit_length()


class WindowBuffers:
    """A window of `width` slots per row, refilled for every step.

    What a forward needs beyond the tree is computed from these tensors alone: no number of the
    host's may become a constant of the recording.
    """

    def __init__(self, kv: RaggedKV, width: int):
        batch, device = kv.batch, kv.prefix_len.device
        self.width = width
        self.prefix_len = kv.prefix_len
        self.slots = torch.arange(width, device=device)
        self.own_bit = _words(torch.eye(width, dtype=torch.bool)).to(device)
        self.chain = _words(torch.ones(width, width, dtype=torch.bool).tril()).to(device)
        self.tree = DraftTree(
            torch.zeros(batch, width, dtype=torch.int64, device=device),
            torch.zeros(batch, width, dtype=torch.int32, device=device),
            torch.zeros(batch, dtype=torch.int32, device=device),
            self.own_bit.repeat(batch, 1, 1),
            torch.zeros(batch, width, dtype=torch.int32, device=device),
        )

    def fill(self, tree: DraftTree) -> None:
        """Takes the window in. The slots behind it are padding, as `DraftTree` defines it."""
        ids, _, num_nodes, mask, depth = self.tree[:5]
        assert mask is not None and depth is not None
        used = tree.width
        ids.copy_(tree.draft_token_ids[:, :1].expand_as(ids))
        ids[:, :used] = tree.draft_token_ids
        num_nodes.copy_(tree.num_nodes)
        mask.copy_(self.own_bit)
        depth.zero_()
        if tree.tree_mask is None:
            mask[:, :used] = self.chain[:used]
            depth[:, :used] = self.slots[:used]
        else:
            words = min(tree.tree_mask.shape[2], mask.shape[2])
            mask[:, :used, :words] = tree.tree_mask[:, :, :words]
            depth[:, :used] = tree.depth if tree.depth is not None else self.slots[:used]

    def places(self) -> Tensor:
        """Slots of the cache that the window's K and V go to, int64 [B, T]."""
        return self.prefix_len.long()[:, None] + self.slots

    def position_ids(self) -> Tensor:
        """int64 [B, T]; 0 behind the nodes: a row may stand beyond the model's last position."""
        assert self.tree.depth is not None
        positions = self.prefix_len.long()[:, None] + self.tree.depth
        return positions * (self.slots < self.tree.num_nodes[:, None])

    def cache_position(self) -> Tensor:
        """int64 [T], of the longest row."""
        return self.prefix_len.long().max() + self.slots


def _words(sees: Tensor) -> Tensor:
    """Ancestor words int64 [T, ceil(T / 64)] of bool [T, T]."""
    size = len(sees)
    num_words = (size + 63) // 64
    padded = torch.zeros(size, 64 * num_words, dtype=torch.int64)
    padded[:, :size] = sees
    return (padded.view(size, num_words, 64) << torch.arange(64)).sum(2)
