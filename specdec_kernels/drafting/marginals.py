"""Trees over tokens that were guessed independently of each other: each further position of the
text has its own distribution, whatever stands before it.

The probability of a path is then the product of its tokens', and the most likely paths make the
tree that is expected to be accepted longest.
Sources: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads", 2024; DDTree, arXiv:2604.12989.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specdec_kernels.drafting.acceptance import SlotAcceptance
from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.drafting.none import roots_only
from specdec_kernels.drafting.window import with_chances
from specdec_kernels.ops.build_tree import build_tree
from specdec_kernels.ops.topk_logprobs import topk_logprobs
from specdec_kernels.tree import Decision, DraftTree, SamplingParams, roots_of

CONFIDENCE = 3

Path = tuple[int, ...]  # ranks of a node and its ancestors among their siblings, the root's first


class Guesses(Protocol):
    """Where the distributions come from.

    number: how many positions ahead. cost, acceptance: learnt while decoding; they outlive the
    runs.
    """

    number: int
    cost: DraftCost
    acceptance: SlotAcceptance


class Candidates(NamedTuple):
    """The nodes that a tree may have, parents first.

    ranks: of each node and its ancestors, int64 [M, levels], 0 behind its own. depth: int64 [M].
    parents: int32 [M], -1 for the root.
    """

    ranks: Tensor
    depth: Tensor
    parents: Tensor

    @staticmethod
    def of(paths: Sequence[Path], levels: int) -> Candidates:
        index = {path: i for i, path in enumerate(paths)}
        return Candidates(
            torch.tensor([[*path, *[0] * (levels - len(path))] for path in paths]),
            torch.tensor([len(path) for path in paths]),
            torch.tensor([index.get(path[:-1], -1) for path in paths], dtype=torch.int32),
        )


class MarginalDrafter:
    """The most likely trees. A token that ends the text has no children.

    topk: children per token; 1 drafts chains. choices: the paths to draft from, parents first; None
        for all that topk allows.
    depth: levels, at most. min_tokens: trees of fewer levels are dropped. p_min: tokens of lower
        probability are not drafted. tells_chances: trees come with their nodes' chances.
    """

    hidden_layers: Sequence[int] = ()
    target_ids: Tensor | None = None  # target id of each draft id, int64 [Vd]; None: equal ids

    def __init__(
        self,
        guesses: Guesses,
        *,
        topk: int,
        choices: Sequence[Path] | None = None,
        depth: int | None = None,
        min_tokens: int = 0,
        p_min: float = 0.0,
        tells_chances: bool = False,
        eos_token_ids: frozenset[int] = frozenset(),
    ):
        self.guesses = guesses
        self.number = min(guesses.number, sys.maxsize if depth is None else depth)
        self.topk = topk
        self.choices = choices
        self.min_tokens = max(min_tokens, 1)
        self.least = math.log(p_min) if p_min > 0 else -math.inf
        self.tells_chances = tells_chances
        self.ends = torch.tensor(sorted(eos_token_ids), dtype=torch.int64)
        self._candidates: dict[tuple[int, int], Candidates] = {}
        self._nodes: list[int] | None = None  # of the last trees

    def confidence(self, tokens: Tensor, lens: Tensor) -> list[int]:
        return [CONFIDENCE if self._room(n) > 0 else 0 for n in lens.tolist()]

    def expected(self, drafted: int) -> float:
        """Tokens per step with a tree of `drafted` tokens, as far as it was learnt."""
        most = self.number if self.topk == 1 else drafted
        most = most if self.choices is None else len(self.choices)
        expected = self.guesses.acceptance.expected(min(drafted, most))
        return min(expected, 1.0 + min(drafted, self.number))

    def propose(
        self,
        tokens: Tensor,
        lens: Tensor,
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        max_depth: Sequence[int],
    ) -> DraftTree:
        self._nodes = None
        limits = zip(max_nodes, max_depth, lens.tolist(), strict=True)
        depths = [min(n - 1, depth, self.number, self._room(length)) for n, depth, length in limits]
        depths = [depth if depth >= self.min_tokens else 0 for depth in depths]
        if not any(depths):
            return roots_only(tokens, lens, max_nodes)
        self._catch_up(depths)
        started = time.perf_counter()
        roots = roots_of(tokens, lens)
        self.ends = self.ends.to(roots.device)
        tree = self._draft(roots, self._guess(roots, depths), sampling, max_nodes, depths)
        self._nodes = tree.num_nodes.tolist()
        self.guesses.cost.record(len(depths), max(depths), time.perf_counter() - started)
        return tree

    def learn(self, decision: Decision) -> None:
        """Which slots of the last trees were accepted."""
        for path, nodes in zip(decision.path.tolist(), self._nodes or [], strict=False):
            if nodes > 1:
                slots = [slot for slot in path if 0 < slot < nodes]
                self.guesses.acceptance.record(nodes - 1, slots)

    def end(self, tokens: Tensor, lens: Tensor) -> None:
        pass

    def _room(self, length: int) -> int:
        """Tokens that can be drafted behind a text."""
        return sys.maxsize

    def _catch_up(self, depths: Sequence[int]) -> None:
        """What no step's cost should count: a long text that was not read yet."""

    def _guess(self, roots: Tensor, depths: Sequence[int]) -> list[Tensor]:
        """Logits [B, Vd] of each of the next max(depths) tokens; of rows of depth 0, anything."""
        raise NotImplementedError

    def _draft(
        self,
        roots: Tensor,
        logits: list[Tensor],
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        depths: Sequence[int],
    ) -> DraftTree:
        return self._best_tree(roots, logits, max_nodes, depths)

    def _best_tree(
        self,
        roots: Tensor,
        logits: list[Tensor],
        max_nodes: Sequence[int],
        depths: Sequence[int],
    ) -> DraftTree:
        known = self._candidates_within(max(max_nodes) - 1, max(depths), roots.device)
        token_ids, scores = self._score(known, logits, depths)
        most = torch.tensor(max_nodes, dtype=torch.int32, device=roots.device)
        parents = known.parents.expand(len(roots), -1).contiguous()

        def build(width: int) -> DraftTree:
            return build_tree(roots, token_ids, scores, parents, max_nodes=most, width=width)

        tree = build(min(max(max_nodes), 1 + len(known.depth)))
        assert tree.depth is not None
        short = tree.depth.amax(1) < self.min_tokens
        most = torch.where(short, tree.num_nodes.clamp(max=1), tree.num_nodes)
        width = max(int(most.max()), 1)
        if width < tree.width or bool((most < tree.num_nodes).any()):
            tree = build(width)
        if self.tells_chances:
            tree = with_chances(tree, scores)
        is_chain = not bool(known.ranks.any())
        return tree._replace(tree_mask=None, depth=None) if is_chain else tree

    def _candidates_within(self, nodes: int, levels: int, device: torch.device) -> Candidates:
        key = nodes, levels
        if key not in self._candidates:
            if self.choices is None:
                found = _likely(nodes, self.topk, levels)
            else:
                found = Candidates.of([p for p in self.choices if len(p) <= levels], levels)
            self._candidates[key] = Candidates._make(field.to(device) for field in found)
        return self._candidates[key]

    def _score(
        self, known: Candidates, logits: list[Tensor], depths: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Token and log probability of every candidate, [B, M]; -infinity is none."""
        ranks, depth, levels = known.ranks, known.depth, known.ranks.shape[1]
        topk = int(ranks.max()) + 1
        best = [topk_logprobs(x, topk)[:2] for x in logits]
        logprobs, ids = (torch.stack(parts, 1) for parts in zip(*best, strict=True))
        ids = ids if self.target_ids is None else self.target_ids[ids]
        logprobs = logprobs.masked_fill(logprobs < self.least, -torch.inf)
        every = torch.arange(levels, device=ranks.device)
        steps = logprobs[:, every, ranks]  # [B, M, levels]
        ends = torch.isin(ids, self.ends)[:, every, ranks]
        steps[:, :, 1:].masked_fill_(ends[:, :, :-1], -torch.inf)
        own = (depth - 1).expand(len(steps), -1)[..., None]
        scores = steps.cumsum(2).gather(2, own)[..., 0]
        limits = torch.tensor(depths, device=depth.device)[:, None]
        scores = scores.masked_fill(depth > limits, -torch.inf)
        return ids[:, every, ranks].gather(2, own)[..., 0], scores


@functools.lru_cache(maxsize=64)  # every run of every patched model asks for the same few
def _likely(nodes: int, topk: int, levels: int) -> Candidates:
    return Candidates.of(likely_paths(nodes, topk, levels), levels)


def likely_paths(nodes: int, topk: int, levels: int) -> list[Path]:
    """The paths that can be among the best `nodes`, level by level.

    A path is no likelier than any other one whose ranks are all at most its own, nor than the
    beginnings of those: where they alone fill `nodes` places, none is left for it.
    """
    found: list[Path] = []
    level: list[tuple[Path, int, int]] = [((), 1, 0)]  # path, those at least as good, with prefixes
    for _ in range(levels):
        below = []
        for path, ways, places in level:
            for rank in range(topk):
                needed = places + ways * (rank + 1)
                if needed > nodes:
                    break
                below.append(((*path, rank), ways * (rank + 1), needed))
        level = below
        found += [path for path, _, _ in level]
    return found
