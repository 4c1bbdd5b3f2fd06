"""DFlash in one run: the K/V that the text has in its layers, and blocks behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec_kernels.cache import RaggedKV
from specdec_kernels.drafting.acceptance import SlotAcceptance
from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.drafting.dflash.network import BlockNetwork
from specdec_kernels.drafting.layers import Slots
from specdec_kernels.drafting.unread import Unread
from specdec_kernels.ops.tree_attention import tree_attention

CHUNK = 256
FEW = 32  # tokens that a step reads beside its block


class BlockRun:
    """The `Guesses` of DFlash. The cache holds what committed tokens are to the layers; the K and V
    of a block stand behind them for one forward.

    around: a context for forwards over that many slots, for kernels of the caller's.
    """

    def __init__(
        self,
        network: BlockNetwork,
        batch: int,
        max_slots: int,
        device: torch.device,
        cost: DraftCost,
        acceptance: SlotAcceptance,
        around: Callable[[int], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        self.network, self.cost, self.acceptance, self.around = network, cost, acceptance, around
        self.number = network.drafted
        self.max_positions = network.config.max_positions
        size = network.config.block_size
        self.kv = RaggedKV(batch, max_slots + max(size, CHUNK), device)
        self.unread = Unread(batch)
        places = torch.arange(size, device=device)
        self._places = places.int()
        self._everywhere = _mask_of(size, device)

    def begin(self, features: Tensor, lens: Sequence[int]) -> None:
        """An empty cache, and the hidden states [B, S, n] of prompts of `lens` tokens."""
        self.kv.set_lens([0] * len(lens))
        self.unread.begin(features, lens)

    def read(self, drafting: Sequence[bool], left: int) -> None:
        """Takes hidden states into the cache, of some rows, until at most `left` are unread."""
        while True:
            have = zip(self.unread.counts(), drafting, strict=True)
            counts = [min(n, CHUNK) if on and n > left else 0 for n, on in have]
            if not any(counts):
                return
            self._read(counts)

    def states(self, roots: Tensor, drafting: Sequence[bool], levels: int) -> Tensor:
        """What says each of the `levels` tokens behind the roots, int64 [B]: [B, levels, d]."""
        self.read(drafting, left=0)
        ids = self.network.block_of(roots)
        self.kv.reserve(max(self.kv.lens) + ids.shape[1])
        positions = self.kv.prefix_len[:, None] + self._places
        with self.around(ids.numel()):
            states = self.network(ids, Slots(positions, self._attention(drafting)))
        first = states.shape[1] - self.number
        return states[:, first : first + levels]

    def logits(self, states: Tensor) -> list[Tensor]:
        """[B, Vd] for each level."""
        with self.around(states.shape[0] * states.shape[1]):
            return list(self.network.logits(states).unbind(1))

    def _read(self, counts: Sequence[int]) -> None:
        features = self.unread.take(counts, self.network.fc.weight)
        width = features.shape[1]
        self.kv.reserve(max(self.kv.lens) + width)
        positions = self.kv.prefix_len[:, None] + torch.arange(width, device=features.device)
        with self.around(features.shape[0] * width):
            for layer, (k, v) in enumerate(self.network.keys_values(features, positions)):
                self._write(layer, k, v)
        self.kv.set_lens([have + n for have, n in zip(self.kv.lens, counts, strict=True)])

    def _write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Puts K and V [B, T, Hkv, D] behind the rows' prefixes."""
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if layer not in self.kv.keys:
            self.kv.write_prefill(layer, k, v, [0] * len(k))
        return self.kv.write_window(layer, k, v)

    def _attention(
        self, drafting: Sequence[bool]
    ) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        config, size, device = self.network.config, len(self._places), self._places.device
        nodes = torch.tensor([size if on else 0 for on in drafting], dtype=torch.int32).to(device)
        depth = self._places.expand(len(drafting), -1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._write(layer, k, v)
            causal = config.causal[layer]
            out, _ = tree_attention(
                q,
                keys,
                values,
                self.kv.prefix_len,
                nodes,
                None if causal else self._everywhere,
                None if causal else depth,
                scale=config.head_dim**-0.5,
                window=config.windows[layer],
            )
            return out

        return attend


def _mask_of(size: int, device: torch.device) -> Tensor:
    """Words int64 [1, size, ceil(size / 64)] by which every slot of a block sees every other."""
    words = [-1] * (size // 64) + [(1 << size % 64) - 1] * (size % 64 > 0)
    return torch.tensor(words, device=device).expand(1, size, -1).contiguous()
