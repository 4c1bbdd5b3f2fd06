"""An EAGLE head in one run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.drafting.eagle.network import Head
from specdec_kernels.drafting.layers import Slots
from specdec_kernels.drafting.recurrent import RecurrentRun
from specdec_kernels.ops.tree_attention import tree_attention
from specdec_kernels.tree import DraftTree


class HeadRun(RecurrentRun):
    def __init__(
        self,
        head: Head,
        batch: int,
        max_slots: int,
        device: torch.device,
        cost: DraftCost,
        around: Callable[[int], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        super().__init__(head, batch, max_slots, device, cost, around)
        self.head = head

    def _read(self, tree: DraftTree) -> Tensor:
        counts = tree.num_nodes.tolist()
        positions = self.kv.prefix_len[:, None] + torch.arange(tree.width, device=self.carry.device)
        with self.around(tree.draft_token_ids.numel()):
            hidden = self._hidden(counts, tree.width)
            out, after = self.head(
                tree.draft_token_ids,
                hidden,
                Slots(positions, self._attention(tree, self.kv.prefix_len)),
            )
        for b, n in enumerate(counts):
            if n:
                self.carry[b] = after[b, n - 1]
        return out

    def _hidden(self, counts: list[int], width: int) -> Tensor:
        """[B, T, d]; takes what it gives."""
        hidden = self.carry[:, None].expand(-1, width, -1)
        features, true = self._true(counts, width)
        if true:
            is_true = torch.zeros(len(counts), 1, 1, dtype=torch.bool, device=hidden.device)
            is_true[true] = True
            hidden = torch.where(is_true, self.head.fuse(features), hidden)
        return hidden

    def expand(
        self, hidden: Tensor, window: DraftTree, prefix_len: Tensor
    ) -> tuple[Tensor, Tensor]:
        size = hidden.shape[1]
        assert window.depth is not None
        slots = Slots(
            prefix_len[:, None] + window.depth[:, -size:], self._attention(window, prefix_len)
        )
        with self.around(hidden.shape[0] * size):
            out, after = self.head(window.draft_token_ids[:, -size:], hidden, slots)
            return self.head.lm_head(out), after

    def _attention(
        self, tree: DraftTree, prefix_len: Tensor
    ) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        """K and V [B, T, Hkv, D] go behind the cache's; q belongs to the last slots of `tree`."""
        config = self.head.config

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.kv.write_window(layer, k.transpose(1, 2), v.transpose(1, 2))
            before = tree.width - q.shape[1]  # slots of older levels, which ask nothing
            out, _ = tree_attention(
                pad(q, (0, 0, 0, 0, before, 0)),
                keys,
                values,
                prefix_len,
                tree.num_nodes,
                tree.tree_mask,
                tree.depth,
                scale=config.head_dim**-0.5,
                window=config.window,
            )
            return out[:, before:]

        return attend
