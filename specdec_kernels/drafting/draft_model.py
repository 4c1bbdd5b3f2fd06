"""A smaller model with the same vocabulary drafts, token by token.

Its K/V follow the text: what a verification accepted is kept, and the tokens that it has not read
yet (the bonus token, and the last draft when all were accepted) are read by the next first forward,
for every row as many as it lacks.
Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.drafting.draw import is_sampled, next_tokens
from specdec_kernels.drafting.none import roots_only
from specdec_kernels.drafting.window import BestFirst, Reader, chains, read, slots_in, with_chances
from specdec_kernels.ops.topk_logprobs import topk_logprobs
from specdec_kernels.tree import Decision, DraftTree, SamplingParams, roots_of

if TYPE_CHECKING:
    from specdec_kernels.drafting.intersection import Intersection
    from specdec_kernels.drafting.transcript import TextTranslation

CONFIDENCE = 3
LONGEST_WINDOW = 64
FEW = 4  # tokens that cost as much to read as one


class DraftModel(Reader, Protocol):
    """A causal language model in one run, with K/V of its own; its logits are over target ids.

    max_positions: None without a limit. cost: outlives the run.
    """

    max_positions: int | None
    cost: DraftCost

    def prefill(self, tokens: Tensor, lens: list[int]) -> None:
        """Reads tokens[b, :lens[b]] of int32 [B, S] into an empty cache; some lens may be 0."""


class TranslatedModel(DraftModel, Protocol):
    """A model whose tokenizer may be another one than the target's.

    translation: None if it is not. With an Intersection its ids are shared ones, and with a
        TextTranslation its ids and logits are its own.
    """

    translation: Intersection | TextTranslation | None


class DraftModelDrafter:
    """Chains, or with topk above 1 the most likely trees.

    rule: that of the verification. probabilistic: chains for sampled text are drawn, and come with
        the logits that they were drawn from. Under rule "coupled" they are drawn with the target's
        own noise instead, so that the two agree as often as they can.
    depth: levels of a tree, at most. min_tokens: shorter drafts are dropped. p_min: tokens of lower
        probability are not drafted. tells_chances: trees come with their nodes' chances, unless
        they were drawn.
    """

    hidden_layers: Sequence[int] = ()

    def __init__(
        self,
        model: DraftModel,
        *,
        rule: str = "auto",
        probabilistic: bool = False,
        topk: int = 1,
        depth: int | None = None,
        min_tokens: int = 0,
        p_min: float = 0.0,
        tells_chances: bool = False,
        eos_token_ids: frozenset[int] = frozenset(),
    ):
        self.model = model
        self.rule = rule
        self.probabilistic = probabilistic
        self.topk = topk
        self.deepest = sys.maxsize if depth is None or topk == 1 else depth
        self.min_tokens = max(min_tokens, 1)
        self.least = math.log(p_min) if p_min > 0 else -math.inf
        self.tells_chances = tells_chances
        self.eos_token_ids = eos_token_ids
        self._roots: list[int] = []  # their positions
        self._trees: tuple[DraftTree, DraftTree] | None = None  # as last read, as proposed

    def begin(self, tokens: Tensor, lens: Tensor, features: Tensor | None) -> None:
        self.model.kv.set_lens([0] * len(tokens))

    def confidence(self, tokens: Tensor, lens: Tensor) -> list[int]:
        """0 for a row that has reached the end of the draft model's positions."""
        return [CONFIDENCE if self._room(n) > 0 else 0 for n in lens.tolist()]

    def propose(
        self,
        tokens: Tensor,
        lens: Tensor,
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        max_depth: Sequence[int],
    ) -> DraftTree:
        lengths = lens.tolist()
        self._roots, self._trees = [n - 1 for n in lengths], None
        limits = zip(max_nodes, max_depth, lengths, strict=True)
        depths = [min(nodes - 1, depth, self.deepest, self._room(n)) for nodes, depth, n in limits]
        depths = [depth if depth >= self.min_tokens else 0 for depth in depths]
        if not any(depths):
            return roots_only(tokens, lens, max_nodes)
        if not any(self.model.kv.lens):
            rows = zip(self._roots, depths, strict=True)
            self.model.prefill(tokens, [root if depth else 0 for root, depth in rows])
        unread = self._catch_up(tokens, lengths, depths)
        started = time.perf_counter()
        logits = self._read_text(tokens, unread)
        logits = logits[list(range(len(unread))), [max(n - 1, 0) for n in unread]]
        roots = roots_of(tokens, lens)[:, None]
        if self.topk > 1:
            tree = self._best_tree(roots, logits, max_nodes, depths)
        else:
            tree = self._chain(roots, logits, sampling, max_nodes, depths)
        self.model.cost.record(len(depths), max(max_nodes) - 1, time.perf_counter() - started)
        return tree

    def commit(self, decision: Decision, features: Tensor | None) -> None:
        kv = self.model.kv
        if self._trees is not None:
            kv.commit(*slots_in(*self._trees, decision))
            return
        rows = zip(kv.lens, self._roots, decision.num_kept, strict=True)
        kv.set_lens([min(have, root + kept) for have, root, kept in rows])

    def end(self, tokens: Tensor, lens: Tensor) -> None:
        pass

    def _room(self, length: int) -> int:
        """Tokens that can be drafted behind a text; the model never reads the last one."""
        limit = self.model.max_positions
        return sys.maxsize if limit is None else max(limit - length + 1, 0)

    def _catch_up(
        self, tokens: Tensor, lengths: list[int], depths: list[int], leave: int = 1
    ) -> list[int]:
        """Reads what steps without drafts left unread; how many tokens remain, of drafting rows.

        leave: as many remain unread at least, if they were.
        """

        def unread() -> list[int]:
            rows = zip(lengths, self.model.kv.lens, depths, strict=True)
            return [length - have if depth else 0 for length, have, depth in rows]

        while max(counts := unread()) > FEW:
            self._read_text(tokens, [min(max(n - leave, 0), LONGEST_WINDOW) for n in counts])
        return counts

    def _read_text(self, tokens: Tensor, counts: list[int]) -> Tensor:
        at = self.model.kv.prefix_len.long()[:, None]
        at = at + torch.arange(max(counts), device=tokens.device)
        return self._read(tokens.gather(1, at.clamp(max=tokens.shape[1] - 1)).long(), counts)

    def _read(self, ids: Tensor, counts: list[int]) -> Tensor:
        """Reads counts[b] tokens of each row behind its prefix; logits [B, max(counts), V]."""
        kv = self.model.kv
        logits = read(self.model, chains(ids, counts))
        kv.set_lens([have + n for have, n in zip(kv.lens, counts, strict=True)])
        return logits

    def _chain(
        self,
        roots: Tensor,
        logits: Tensor,
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        depths: list[int],
    ) -> DraftTree:
        """roots int64 [B, 1], logits [B, V] behind them."""
        drawn = self._is_drawn(sampling)
        ids: list[Tensor] = [roots]
        laws: list[Tensor | None] = []
        logprobs: list[Tensor] = []
        counts, going = [0] * len(depths), [depth > 0 for depth in depths]
        while any(going):
            if laws:
                logits = self._read(ids[-1], [int(on) for on in going])[:, 0]
            token, law = self._next(logits, sampling, len(laws), drawn)
            logprobs.append(self._best_logprobs(logits, drawn))
            unlikely = (logprobs[-1] < self.least).tolist()
            ids.append(token[:, None])
            laws.append(law)
            for b, value in enumerate(token.tolist()):
                going[b] &= not unlikely[b]
                counts[b] += going[b]
                ends = value in self.eos_token_ids and not drawn
                going[b] &= counts[b] < depths[b] and not ends
        counts = [n if n >= self.min_tokens else 0 for n in counts]
        width = 1 + max(counts)
        nodes = [n + 1 if most else 0 for n, most in zip(counts, max_nodes, strict=True)]
        # No slot hangs on the last one: any row of logits will do there.
        drawn_from = [law for law in (*laws, laws[-1])[:width] if law is not None]
        tree = chains(
            torch.cat(ids, 1)[:, :width], nodes, torch.stack(drawn_from, 1) if drawn_from else None
        )
        if drawn or not self.tells_chances:
            return tree
        chances = torch.stack(logprobs, 1)[:, : width - 1].cumsum(1).exp()
        return tree._replace(chances=pad(chances, (1, 0), value=1.0))

    def _is_drawn(self, sampling: SamplingParams | None) -> bool:
        return self.probabilistic and is_sampled(sampling)

    def _next(
        self, logits: Tensor, sampling: SamplingParams | None, depth: int, drawn: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens int64 [B] behind drafts of `depth` tokens, and the logits of a draw."""
        return next_tokens(logits, sampling, depth, drawn=drawn, rule=self.rule)

    def _best_logprobs(self, logits: Tensor, drawn: bool) -> Tensor:
        """[B], of each row's best token; 0 where nobody asks."""
        if self.least == -math.inf and (drawn or not self.tells_chances):
            return logits.new_zeros(len(logits))
        return topk_logprobs(logits, 1)[0][:, 0]

    def _best_tree(
        self, roots: Tensor, logits: Tensor, max_nodes: Sequence[int], depths: list[int]
    ) -> DraftTree:
        kv = self.model.kv
        rows = zip(kv.lens, depths, strict=True)
        kv.set_lens([have - 1 if depth else have for have, depth in rows])  # roots are slot 0
        growth = BestFirst(
            self.model,
            self.topk,
            max_nodes,
            depths,
            min_depth=self.min_tokens,
            least=self.least,
            eos_token_ids=self.eos_token_ids,
        )
        tree, window = growth.grow(roots[:, 0], logits)
        if self.tells_chances:
            tree = with_chances(tree, growth.scores)
        if window is None:
            kv.set_lens([have + (depth > 0) for have, depth in zip(kv.lens, depths, strict=True)])
        else:
            self._trees = window, tree
        return tree
