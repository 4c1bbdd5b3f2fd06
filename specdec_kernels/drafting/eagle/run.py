"""An EAGLE head in one run: its K/V, and the target's hidden states that it has yet to read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_kernels.cache import RaggedKV
from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.drafting.eagle.network import Head
from specdec_kernels.drafting.layers import Slots
from specdec_kernels.drafting.unread import Unread
from specdec_kernels.drafting.window import chains
from specdec_kernels.ops.tree_attention import tree_attention
from specdec_kernels.tree import Decision, DraftTree

CHUNK = 256


class HeadRun:
    """The `DraftModel` of an EAGLE head, over texts without their first token.

    Slot i of a row stands for token i + 1 and the target's hidden state of token i. A forward gives
    each row's slots the hidden states that `add` brought, in order; a row that has none left goes
    on with the output of its last slot, `carry`.

    around: a context for forwards over that many slots, for kernels of the caller's.
    """

    def __init__(
        self,
        head: Head,
        batch: int,
        max_slots: int,
        device: torch.device,
        cost: DraftCost,
        around: Callable[[int], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        self.head, self.cost, self.around = head, cost, around
        self.max_positions = head.config.max_positions
        self.kv = RaggedKV(batch, max_slots, device)
        dtype = head.fc.weight.dtype
        self.carry = torch.zeros(batch, head.config.hidden_size, dtype=dtype, device=device)
        self._unread = Unread(batch)

    def begin(self, features: Tensor, lens: Sequence[int]) -> None:
        """An empty cache, and the hidden states [B, S, n] of prompts of `lens` tokens."""
        self.kv.set_lens([0] * len(lens))
        self._unread.begin(features, lens)

    def add(self, decision: Decision, features: Tensor) -> None:
        """The hidden states [B, T, n] of the target's window: those of kept slots come next."""
        self._unread.add(decision, features)

    def forget(self, b: int) -> None:
        """For a row that will not draft again."""
        self._unread.forget(b)

    def prefill(self, tokens: Tensor, lens: list[int]) -> None:
        """Reads tokens[b, :lens[b]]; some lens may be 0."""
        for start in range(0, max(lens), CHUNK):
            counts = [min(max(n - start, 0), CHUNK) for n in lens]
            width = max(counts)
            self.kv.reserve(max(self.kv.lens) + width)
            self._read(chains(tokens[:, start : start + width].long(), counts))
            self.kv.set_lens([have + n for have, n in zip(self.kv.lens, counts, strict=True)])

    def forward(self, tree: DraftTree) -> Tensor:
        """Logits [B, T, Vd] of chains, the window's K/V behind the rows' prefixes."""
        out = self._read(tree)
        with self.around(out.shape[0] * out.shape[1]):
            return self.head.lm_head(out)

    def _read(self, tree: DraftTree) -> Tensor:
        """What `lm_head` reads, [B, T, d]."""
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
        have = self._unread.counts()
        true = [n if unread else 0 for n, unread in zip(counts, have, strict=True)]
        if any(true):
            fused = self.head.fuse(self._unread.take(true, self.carry))
            fused = pad(fused, (0, 0, 0, width - fused.shape[1]))
            is_true = torch.tensor(true, device=hidden.device)[:, None, None] > 0
            hidden = torch.where(is_true, fused, hidden)
        return hidden

    def expand(
        self, hidden: Tensor, window: DraftTree, prefix_len: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Reads the last K slots of a window whose others were read before, hidden [B, K, d].

        The cache's lens are those of the prefixes and the older slots. Returns logits [B, K, Vd]
        and the hidden states [B, K, d] that the slots' children are given.
        """
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
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            if layer not in self.kv.keys:
                self.kv.write_prefill(layer, k, v, [0] * len(k))
            keys, values = self.kv.write_window(layer, k, v)
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
