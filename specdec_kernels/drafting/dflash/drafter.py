"""DFlash drafts: chains or trees from one forward, whatever their size."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.drafting.dflash.run import FEW, BlockRun
from specdec_kernels.drafting.draw import is_sampled, next_tokens
from specdec_kernels.drafting.marginals import MarginalDrafter
from specdec_kernels.drafting.window import chains
from specdec_kernels.tree import Decision, DraftTree, SamplingParams


class DFlashDrafter(MarginalDrafter):
    """probabilistic: chains for sampled text are drawn, each token from its own position's
        distribution. rule: that of the verification; see `next_tokens`.
    options: those of MarginalDrafter.
    """

    def __init__(
        self, run: BlockRun, *, rule: str = "auto", probabilistic: bool = False, **options: Any
    ):
        super().__init__(run, **options)
        self.run, self.rule, self.probabilistic = run, rule, probabilistic
        self.hidden_layers = run.network.config.hidden_layers
        self.target_ids = run.network.target_ids
        self._lens: list[int] = []  # of the texts, roots included

    def begin(self, tokens: Tensor, lens: Tensor, features: Tensor | None) -> None:
        assert features is not None  # of hidden_layers
        self._lens = lens.tolist()
        self.run.begin(features, [n - 1 for n in self._lens])

    def commit(self, decision: Decision, features: Tensor | None) -> None:
        assert features is not None
        self.run.unread.add(decision, features)
        self.learn(decision)
        self._lens = [n + kept for n, kept in zip(self._lens, decision.num_kept, strict=True)]
        for b, length in enumerate(self._lens):
            if self._room(length) == 0:
                self.run.unread.forget(b)

    def _room(self, length: int) -> int:
        limit = self.run.max_positions
        return sys.maxsize if limit is None else max(limit - length, 0)

    def _catch_up(self, depths: Sequence[int]) -> None:
        self.run.read([depth > 0 for depth in depths], left=FEW)

    def _guess(self, roots: Tensor, depths: Sequence[int]) -> list[Tensor]:
        return self.run.logits(roots, [depth > 0 for depth in depths], max(depths))

    def _draft(
        self,
        roots: Tensor,
        logits: list[Tensor],
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        depths: Sequence[int],
    ) -> DraftTree:
        if sampling is None or not (self.probabilistic and is_sampled(sampling)):
            return super()._draft(roots, logits, sampling, max_nodes, depths)
        ids, laws = [roots], []
        for depth, level in enumerate(logits):
            token, law = self._next(level, sampling, depth)
            ids.append(token)
            laws += [] if law is None else [law]
        nodes = [depth + 1 if most else 0 for depth, most in zip(depths, max_nodes, strict=True)]
        if not laws:
            return chains(torch.stack(ids, 1), nodes)
        # No slot hangs on the last one: any row of logits will do there.
        tree = chains(torch.stack(ids, 1), nodes, torch.stack([*laws, laws[-1]], 1))
        return tree._replace(draft_vocab_map=self.target_ids)

    def _next(
        self, logits: Tensor, sampling: SamplingParams, depth: int
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens of the target; the logits of a draw are over the draft vocabulary."""
        ids = self.target_ids
        if ids is not None and self.rule == "coupled":
            shape = (len(logits), self.run.network.config.vocab_size)
            logits, ids = logits.new_full(shape, -torch.inf).index_copy(1, ids, logits), None
        token, law = next_tokens(logits, sampling, depth, drawn=True, rule=self.rule)
        return token if ids is None else ids[token], law
