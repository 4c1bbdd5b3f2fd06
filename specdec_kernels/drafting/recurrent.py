"""A network that drafts from the target's last hidden states, in one run.

Where the target has not been yet, the network goes on from what it made of the token before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_kernels.cache import RaggedKV
from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.drafting.unread import Unread
from specdec_kernels.drafting.window import chains
from specdec_kernels.tree import Decision, DraftTree

CHUNK = 256


class Network(Protocol):
    """hidden_layers: ids of the target's hidden states, see `Drafter`; they arrive side by side.

    carried: size of what a slot passes on to the next one. max_positions: None without a limit.
    vocab_size: of the target. target_ids: its id of each draft id, int64 [Vd]; None: equal ids.
    least_text: shorter texts are not drafted for.
    """

    @property
    def hidden_layers(self) -> tuple[int, ...]: ...
    @property
    def carried(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def max_positions(self) -> int | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def target_ids(self) -> Tensor | None: ...
    @property
    def least_text(self) -> int: ...
    @property
    def lm_head(self) -> Callable[[Tensor], Tensor]: ...


class RecurrentRun:
    """The `DraftModel` of such a network, over texts without their first token.

    Slot i of a row stands for token i + 1 and the target's hidden state of token i. A forward gives
    each row's slots the hidden states that `add` brought, in order; a row that has none left goes
    on with the output of its last slot, `carry`.

    around: a context for forwards over that many slots, for kernels of the caller's.
    """

    def __init__(
        self,
        head: Network,
        batch: int,
        max_slots: int,
        device: torch.device,
        cost: DraftCost,
        around: Callable[[int], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        self.network, self.cost, self.around = head, cost, around
        self.max_positions = head.max_positions
        self.kv = RaggedKV(batch, max_slots, device)
        self.carry = torch.zeros(batch, head.carried, dtype=head.dtype, device=device)
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
            return self.network.lm_head(out)

    def _read(self, tree: DraftTree) -> Tensor:
        """What `lm_head` reads, [B, T, d], of chains; leaves each row's last output in `carry`."""
        raise NotImplementedError

    def expand(
        self, hidden: Tensor, window: DraftTree, prefix_len: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Reads the last K slots of a window whose others were read before, hidden [B, K, carried].

        The cache's lens are those of the prefixes and the older slots. Returns logits [B, K, Vd]
        and what the slots' children are given, [B, K, carried].
        """
        raise NotImplementedError

    def _true(self, counts: list[int], width: int) -> tuple[Tensor, list[int]]:
        """The target's hidden states [B, T, n] of the next slots, and the rows that had any left.

        Takes what it gives.
        """
        have = self._unread.counts()
        taken = [n if unread else 0 for n, unread in zip(counts, have, strict=True)]
        true = [b for b, n in enumerate(taken) if n]
        if not true:
            return self.carry.new_zeros(len(counts), width, 0), true
        features = self._unread.take(taken, self.carry)
        return pad(features, (0, 0, 0, width - features.shape[1])), true
