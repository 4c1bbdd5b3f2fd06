"""DFlash drafts: chains or trees from one forward, whatever their size."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.drafting.dflash.run import FEW, BlockRun
from specdec_kernels.drafting.draw import is_sampled, next_tokens
from specdec_kernels.drafting.marginals import MarginalDrafter
from specdec_kernels.drafting.window import chains
from specdec_kernels.ops.topk_logprobs import topk_logprobs
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
        states = self.run.states(roots, [depth > 0 for depth in depths], max(depths))
        return self.run.logits(states)

    def _draft(
        self,
        roots: Tensor,
        logits: list[Tensor],
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        depths: Sequence[int],
    ) -> DraftTree:
        if self.probabilistic and is_sampled(sampling):
            return self._chain(roots, logits, sampling, max_nodes, depths)
        return super()._draft(roots, logits, sampling, max_nodes, depths)

    def _chain(
        self,
        roots: Tensor,
        logits: list[Tensor],
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        depths: Sequence[int],
    ) -> DraftTree:
        """Token by token, each with what those before it make of its distribution."""
        drawn = self.probabilistic and is_sampled(sampling)
        limits = torch.tensor(depths, device=roots.device)
        going, drafted = limits > 0, torch.zeros_like(limits)
        ids, laws = [roots], []
        for depth, level in enumerate(logits):
            level = self._behind(ids[-1], level)
            token, law = self._next(level, sampling, depth, drawn)
            going = going & (limits > depth) & self._likely(ids[-1], level, depth)
            drafted += going
            going = going if drawn else going & ~torch.isin(token, self.ends)
            ids.append(token)
            laws += [] if law is None else [law]
        counts = [n if n >= self.min_tokens else 0 for n in drafted.tolist()]
        nodes = [n + 1 if most else 0 for n, most in zip(counts, max_nodes, strict=True)]
        width = 1 + max(counts)
        tokens = torch.stack(ids[:width], 1)
        if not laws:
            return chains(tokens, nodes)
        # No slot hangs on the last one: any row of logits will do there.
        tree = chains(tokens, nodes, torch.stack([*laws, laws[-1]][:width], 1))
        return tree._replace(draft_vocab_map=self.target_ids)

    def _behind(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """The logits [B, Vd] of a position as they are behind `tokens`, int64 [B]."""
        return logits

    def _likely(self, tokens: Tensor, logits: Tensor, depth: int) -> Tensor:
        """Whether the best token behind `tokens` is likely enough to be drafted, bool [B]."""
        if self.least == -math.inf:
            return torch.ones_like(tokens, dtype=torch.bool)
        return topk_logprobs(logits, 1)[0][:, 0] >= self.least

    def _next(
        self, logits: Tensor, sampling: SamplingParams | None, depth: int, drawn: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens of the target; the logits of a draw are over the draft vocabulary."""
        ids: dict[str, Any] = dict(
            target_ids=self.target_ids, vocab_size=self.run.network.config.vocab_size
        )
        return next_tokens(logits, sampling, depth, drawn=drawn, rule=self.rule, **ids)
