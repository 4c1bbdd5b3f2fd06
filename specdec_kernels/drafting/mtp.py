"""MTP layers (multi-token prediction) draft: one layer for each token ahead, then the last again.

Layer s reads a token together with what layer s - 1 made of the token before it, layer 0 with the
target's hidden state of that one; layer s so predicts s + 2 tokens behind the last hidden state.
Behind the last layer's own token the last layer goes on, each time from its own output.
Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2; Cai et al., "FastMTP:
Accelerating LLM Inference with Enhanced Multi-Token Prediction", 2025.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specdec_kernels.cache import RaggedKV
from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.drafting.recurrent import Network, RecurrentRun
from specdec_kernels.drafting.window import chains
from specdec_kernels.tree import DraftTree


class Slots(NamedTuple):
    """The last K slots of `tree`, whose prefixes have prefix_len slots; positions int [B, K]."""

    tree: DraftTree
    prefix_len: Tensor
    positions: Tensor


class LayerRun(Protocol):
    """One layer with its K/V in one run."""

    kv: RaggedKV

    def read(self, embedded: Tensor, hidden: Tensor, slots: Slots) -> Tensor:
        """Embedded tokens and hidden states [B, K, d]; what lm_head and the next layer read."""


class MtpNetwork(Network, Protocol):
    @property
    def num_layers(self) -> int: ...
    @property
    def embed_tokens(self) -> Callable[[Tensor], Tensor]: ...

    def open(self, kvs: Sequence[RaggedKV]) -> Sequence[LayerRun]:
        """The layers on the K/V of one run."""


class MtpRun(RecurrentRun):
    """A slot passes on the outputs of all layers, side by side.

    Slot i of every layer stands for token i + 1. Layer s has none for the first s tokens: its K/V
    are that much shorter than `kv`, which is that of layer 0.
    """

    def __init__(
        self,
        head: MtpNetwork,
        batch: int,
        max_slots: int,
        device: torch.device,
        cost: DraftCost,
        around: Callable[[int], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        super().__init__(head, batch, max_slots, device, cost, around)
        self.head, self.last = head, head.num_layers - 1
        further = [RaggedKV(batch, max_slots, device) for _ in range(self.last)]
        self.layers = head.open([self.kv, *further])
        self.level = 0  # drafted tokens behind the text, of what was read last
        self._behind_text = torch.zeros_like(self.carry)

    def _read(self, tree: DraftTree) -> Tensor:
        counts = tree.num_nodes.tolist()
        features, true = self._true(counts, tree.width)
        prefix_len = self.kv.prefix_len
        slots = Slots(
            tree, prefix_len, prefix_len[:, None] + torch.arange(tree.width, device=features.device)
        )
        with self.around(tree.draft_token_ids.numel()):
            if true:
                self.level = 0
                outs = self._read_text(features, counts, slots)
            else:
                self.level += 1
                outs = self._read_drafts(self.carry[:, None], self.level, slots)
        for b, n in enumerate(counts):
            if n:
                self.carry[b] = outs[b, n - 1]
                if true:
                    self._behind_text[b] = self.carry[b]
        return self._predicting(outs, self.level)

    def expand(
        self, hidden: Tensor, window: DraftTree, prefix_len: Tensor
    ) -> tuple[Tensor, Tensor]:
        size = hidden.shape[1]
        assert window.depth is not None
        slots = Slots(window, prefix_len, prefix_len[:, None] + window.depth[:, -size:])
        level = window.width // size
        with self.around(hidden.shape[0] * size):
            outs = self._read_drafts(hidden, level, slots)
            return self.head.lm_head(self._predicting(outs, level)), outs

    def _read_text(self, features: Tensor, counts: list[int], slots: Slots) -> Tensor:
        """Every layer reads the tokens, layer 0 with features [B, T, d]; [B, T, carried]."""
        embedded = self.head.embed_tokens(slots.tree.draft_token_ids)
        before = self._behind_text[:, None].chunk(self.last + 1, -1)
        outs = [self.layers[0].read(embedded, features, slots)]
        for s in range(1, self.last + 1):
            hidden = torch.cat([before[s - 1], outs[-1][:, :-1]], 1)
            lacking = [min(max(s - h, 0), n) for h, n in zip(self.kv.lens, counts, strict=True)]
            outs.append(self._read_layer(s, embedded, hidden, slots, lacking))
        return torch.cat(outs, -1)

    def _read_layer(
        self, s: int, embedded: Tensor, hidden: Tensor, slots: Slots, lacking: list[int]
    ) -> Tensor:
        """A layer behind layer 0, which skips that many tokens of each row."""
        shortened = self._shortened(slots, s)
        if not any(lacking):
            return self._layer(s).read(embedded, hidden, shortened)
        tree, at = slots.tree, torch.arange(slots.tree.width, device=hidden.device)
        skipped = torch.tensor(lacking, device=hidden.device)
        moved = (at + skipped[:, None]).clamp(max=tree.width - 1)
        shortened = shortened._replace(
            tree=chains(tree.draft_token_ids.gather(1, moved), (tree.num_nodes - skipped).tolist()),
            positions=slots.positions.gather(1, moved),
        )
        out = self._layer(s).read(_gathered(embedded, moved), _gathered(hidden, moved), shortened)
        return _gathered(out, (at - skipped[:, None]).clamp(min=0))

    def _read_drafts(self, hidden: Tensor, level: int, slots: Slots) -> Tensor:
        """Tokens `level` behind the text, hidden [B, K, carried] of their parents.

        Layers that the target's hidden states do not reach any more stand still.
        """
        embedded = self.head.embed_tokens(
            slots.tree.draft_token_ids[:, -slots.positions.shape[1] :]
        )
        given = hidden.expand(*embedded.shape[:2], -1).chunk(self.last + 1, -1)
        outs = list(given)
        for s in range(min(level, self.last), self.last + 1):
            hidden = given[s - 1] if level <= s else given[s]
            outs[s] = self._layer(s).read(embedded, hidden, self._shortened(slots, s))
        return torch.cat(outs, -1)

    def _predicting(self, outs: Tensor, level: int) -> Tensor:
        return outs.chunk(self.last + 1, -1)[min(level, self.last)]

    def _layer(self, s: int) -> LayerRun:
        layer = self.layers[s]
        if s:
            layer.kv.set_lens([max(n - s, 0) for n in self.kv.lens])
            layer.kv.reserve(self.kv.capacity)
        return layer

    @staticmethod
    def _shortened(slots: Slots, s: int) -> Slots:
        return slots._replace(prefix_len=(slots.prefix_len - s).clamp(min=0)) if s else slots


def _gathered(x: Tensor, at: Tensor) -> Tensor:
    """Slots `at` [B, T] of x [B, T, d]."""
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[2]))
