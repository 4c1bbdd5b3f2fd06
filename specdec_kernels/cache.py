"""Ragged KV storage: every row of the batch has its own committed length.

Row b holds slots 0 .. lens[b]-1 without padding, so a slot's number is its token's position. The
verify window's K and V go to the slots behind that and become part of the prefix by `commit`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.ops.commit_kv import commit_kv_

GROWTH = 1024


class RaggedKV:
    """K and V of all layers, [B, Hkv, capacity, D] each, allocated when a layer first writes.

    Memory grows in chunks up to `max_slots`: a generous max_length costs nothing until it is used.
    """

    def __init__(self, batch: int, max_slots: int, device: torch.device):
        self.batch = batch
        self.max_slots = max_slots
        self.capacity = 0
        self.lens = [0] * batch
        self.prefix_len = torch.zeros(batch, dtype=torch.int32, device=device)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def reserve(self, slots: int) -> None:
        """Makes room for `slots` slots per row, keeping what is there."""
        if slots <= self.capacity:
            return
        self.capacity = min(max(slots + GROWTH, 2 * self.capacity), max(self.max_slots, slots))
        used = max(self.lens, default=0)
        for store in (self.keys, self.values):
            for layer, old in store.items():
                store[layer] = old.new_empty(*old.shape[:2], self.capacity, old.shape[3])
                store[layer][:, :, :used] = old[:, :, :used]

    def start_again(self, max_slots: int) -> None:
        """Empties the rows for another run; memory and addresses stay."""
        self.max_slots = max_slots
        self.set_lens([0] * self.batch)

    def write_prefill(self, layer: int, k: Tensor, v: Tensor, lens: list[int]) -> None:
        """Takes the K and V of a left-padded prompt, [B, Hkv, L, D], dropping the padding."""
        self._allocate(layer, k, v)
        width = k.shape[2]
        for b, length in enumerate(lens):
            self.keys[layer][b, :, :length] = k[b, :, width - length :]
            self.values[layer][b, :, :length] = v[b, :, width - length :]

    def write_window(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Puts the window's K and V, [B, Hkv, T, D], behind each row's prefix.

        Returns views [B, Hkv, S, D] that cover every row's prefix and window.
        """
        self._allocate(layer, k, v)
        keys, values, width = self.keys[layer], self.values[layer], k.shape[2]
        if min(self.lens) == max(self.lens):
            start = self.lens[0]
            keys[:, :, start : start + width] = k
            values[:, :, start : start + width] = v
        else:
            for b, start in enumerate(self.lens):
                keys[b, :, start : start + width] = k[b]
                values[b, :, start : start + width] = v[b]
        end = max(self.lens) + width
        return keys[:, :, :end], values[:, :, :end]

    def write_at(self, layer: int, k: Tensor, v: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Puts K and V, [B, Hkv, T, D], at the slots `places`, int64 [B, T], of a layer in use.

        Nothing here depends on the lengths that the host knows. Returns the whole storage.
        """
        rows = torch.arange(self.batch, device=places.device)[:, None]
        keys, values = self.keys[layer], self.values[layer]
        keys.transpose(1, 2)[rows, places] = k.transpose(1, 2)
        values.transpose(1, 2)[rows, places] = v.transpose(1, 2)
        return keys, values

    def _allocate(self, layer: int, k: Tensor, v: Tensor) -> None:
        if layer not in self.keys:
            self.keys[layer] = k.new_empty(*k.shape[:2], self.capacity, k.shape[3])
            self.values[layer] = v.new_empty(*v.shape[:2], self.capacity, v.shape[3])

    def set_lens(self, lens: list[int]) -> None:
        self.lens = list(lens)
        self.prefix_len.copy_(torch.tensor(self.lens, dtype=torch.int32))

    def commit(self, path: Tensor, num_kept: list[int]) -> None:
        """Keeps slots path[b, :num_kept[b]] of each row's window and grows the prefix by them.

        path: int32 [B, T], root first.
        """
        kept = torch.tensor(num_kept, dtype=torch.int32, device=path.device)
        in_place = torch.arange(path.shape[1], dtype=torch.int32, device=path.device)
        moves = (path > in_place) & (in_place < kept[:, None])
        # Elsewhere than on the CPU, to look costs more than a kernel that finds nothing to move.
        if self.keys and (not path.is_cpu or bool(moves.any())):
            layers = sorted(self.keys)
            commit_kv_(
                [self.keys[i] for i in layers],
                [self.values[i] for i in layers],
                path,
                kept,
                self.prefix_len,
            )
        self.set_lens([length + n for length, n in zip(self.lens, num_kept, strict=True)])
