"""An EAGLE head drafts: chains or trees, from the target's own hidden states.

What a verification accepted is read again with the target's hidden states in place of the head's
guesses, so that the head's cache holds nothing but true ones behind every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specdec_kernels.drafting.draft_model import DraftModelDrafter
from specdec_kernels.drafting.draw import next_tokens
from specdec_kernels.drafting.eagle.tree import Expansion
from specdec_kernels.drafting.recurrent import RecurrentRun
from specdec_kernels.drafting.window import with_chances
from specdec_kernels.tree import Decision, DraftTree, SamplingParams


class EagleDrafter(DraftModelDrafter):
    """`DraftModelDrafter` over the texts without their first token, as heads read them.

    options: those of DraftModelDrafter.
    """

    def __init__(self, run: RecurrentRun, **options: Any):
        super().__init__(run, **options)
        self.run = run
        self.hidden_layers = run.network.hidden_layers

    def begin(self, tokens: Tensor, lens: Tensor, features: Tensor | None) -> None:
        assert features is not None  # of hidden_layers
        self.run.begin(features, (lens - 1).tolist())

    def confidence(self, tokens: Tensor, lens: Tensor) -> list[int]:
        classes = super().confidence(tokens[:, 1:], lens - 1)
        rows = zip(classes, self._enough(lens), strict=True)
        return [surety if enough else 0 for surety, enough in rows]

    def _enough(self, lens: Tensor) -> list[bool]:
        return (lens >= self.run.network.least_text).tolist()

    def propose(
        self,
        tokens: Tensor,
        lens: Tensor,
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        max_depth: Sequence[int],
    ) -> DraftTree:
        depths = [
            d if enough else 0 for d, enough in zip(max_depth, self._enough(lens), strict=True)
        ]
        return super().propose(tokens[:, 1:], lens - 1, sampling, max_nodes, depths)

    def commit(self, decision: Decision, features: Tensor | None) -> None:
        assert features is not None
        kv = self.run.kv
        kv.set_lens([min(have, root + 1) for have, root in zip(kv.lens, self._roots, strict=True)])
        self.run.add(decision, features)
        for b, (root, kept) in enumerate(zip(self._roots, decision.num_kept, strict=True)):
            if self._room(root + 1 + kept) == 0:
                self.run.forget(b)

    def _chain(
        self,
        roots: Tensor,
        logits: Tensor,
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        depths: list[int],
    ) -> DraftTree:
        tree = super()._chain(roots, logits, sampling, max_nodes, depths)
        drawn = tree.draft_logits is not None
        return tree._replace(draft_vocab_map=self.run.network.target_ids if drawn else None)

    def _next(
        self, logits: Tensor, sampling: SamplingParams | None, depth: int, drawn: bool
    ) -> tuple[Tensor, Tensor | None]:
        network = self.run.network
        ids: dict[str, Any] = dict(target_ids=network.target_ids, vocab_size=network.vocab_size)
        return next_tokens(logits, sampling, depth, drawn=drawn, rule=self.rule, **ids)

    def _best_tree(
        self, roots: Tensor, logits: Tensor, max_nodes: Sequence[int], depths: list[int]
    ) -> DraftTree:
        expansion = Expansion(
            self.run,
            self.topk,
            max_nodes,
            depths,
            min_depth=self.min_tokens,
            least=self.least,
            eos_token_ids=self.eos_token_ids,
        )
        tree = expansion.grow(roots[:, 0], logits)
        return with_chances(tree, expansion.scores) if self.tells_chances else tree
