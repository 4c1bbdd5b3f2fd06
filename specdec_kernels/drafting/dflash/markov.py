"""DSpark: DFlash whose tokens know the one before them.

A table of pairs, in two factors, is added to the logits of a position when the token before it is
known; a second head says how likely the best token then is to be accepted.
Source: DeepSpec (arXiv:2607.05147), 2026.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specdec_kernels.drafting.dflash.drafter import DFlashDrafter
from specdec_kernels.drafting.dflash.network import BlockConfig, BlockNetwork
from specdec_kernels.drafting.dflash.run import BlockRun
from specdec_kernels.drafting.draw import spread
from specdec_kernels.drafting.window import BestFirst
from specdec_kernels.tree import DraftTree, SamplingParams


class MarkovHead(nn.Module):
    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank, device="meta")
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False, device="meta")


class ConfidenceHead(nn.Module):
    def __init__(self, size: int, bias: bool):
        super().__init__()
        self.proj = nn.Linear(size, 1, bias=bias, device="meta")


class DSparkNetwork(BlockNetwork):
    """rank: of the table of pairs. with_markov: whether the confidence head reads the token too.
    Other arguments: those of BlockNetwork.
    """

    def __init__(
        self,
        config: BlockConfig,
        names: Container[str],
        *tables: Any,
        rank: int,
        with_markov: bool,
    ):
        super().__init__(config, names, *tables)
        self.rank, self.with_markov = rank, with_markov
        self.markov_head = MarkovHead(config.vocab_size, config.draft_vocab_size, rank)
        self.confidence_head: ConfidenceHead | None = None
        if "confidence_head.proj.weight" in names:
            size = config.hidden_size + (rank if with_markov else 0)
            self.confidence_head = ConfidenceHead(size, "confidence_head.proj.bias" in names)

    def behind(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Logits [..., Vd] as they are behind tokens, int64 [...]."""
        bias = self.markov_head.markov_w2(self.markov_head.markov_w1(tokens))
        return logits + self.config.logit_scale * bias

    def confidence(self, tokens: Tensor, states: Tensor) -> Tensor | None:
        """Probability [B] that the token behind `tokens` is accepted; states [B, d]."""
        if self.confidence_head is None:
            return None
        if self.with_markov:
            states = torch.cat([states, self.markov_head.markov_w1(tokens)], -1)
        return self.confidence_head.proj(states)[:, 0].float().sigmoid()


class DSparkDrafter(DFlashDrafter):
    """p_min: in chains, for the probability that the confidence head gives, where there is one.
    Other options: those of DFlashDrafter.
    """

    def __init__(self, run: BlockRun, **options: Any):
        super().__init__(run, **options)
        assert isinstance(run.network, DSparkNetwork)
        self.network = run.network
        self._states: Tensor | None = None  # [B, levels, d]

    def _guess(self, roots: Tensor, depths: Sequence[int]) -> list[Tensor]:
        self._states = self.run.states(roots, [depth > 0 for depth in depths], max(depths))
        return self.run.logits(self._states)

    def _draft(
        self,
        roots: Tensor,
        logits: list[Tensor],
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        depths: Sequence[int],
    ) -> DraftTree:
        if self.topk == 1:
            return self._chain(roots, logits, sampling, max_nodes, depths)
        levels = Levels(self.run, self.network, logits)
        tree, _ = BestFirst(
            levels,
            self.topk,
            max_nodes,
            depths,
            min_depth=self.min_tokens,
            least=self.least,
            eos_token_ids=frozenset(self.ends.tolist()),
        ).grow(roots, levels.behind(roots, logits[0]))
        return tree

    def _behind(self, tokens: Tensor, logits: Tensor) -> Tensor:
        with self.run.around(len(tokens)):
            return self.network.behind(tokens, logits)

    def _likely(self, tokens: Tensor, logits: Tensor, depth: int) -> Tensor:
        assert self._states is not None
        sure = None
        if self.least > -math.inf:
            sure = self.network.confidence(tokens, self._states[:, depth])
        if sure is None:
            return super()._likely(tokens, logits, depth)
        return sure >= math.exp(self.least)


class Levels:
    """A `Reader` of trees: what stands behind a node is said by its level and its own token.

    logits: [B, Vd] of each level.
    """

    def __init__(self, run: BlockRun, network: DSparkNetwork, logits: list[Tensor]):
        self.kv, self.run, self.network = run.kv, run, network
        self.logits = torch.stack(logits, 1)

    def forward(self, tree: DraftTree) -> Tensor:
        assert tree.depth is not None
        rows = torch.arange(len(self.logits), device=self.logits.device)[:, None]
        level = tree.depth.long().clamp(max=self.logits.shape[1] - 1)
        return self.behind(tree.draft_token_ids, self.logits[rows, level])

    def behind(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Over the target's vocabulary."""
        network = self.network
        with self.run.around(tokens.numel()):
            corrected = network.behind(tokens, logits)
        return spread(corrected, network.target_ids, network.config.vocab_size)
