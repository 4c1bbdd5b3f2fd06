"""What a draft model reads: chains of unequal length, and trees that grow best first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_kernels.cache import RaggedKV
from specdec_kernels.ops.build_tree import build_tree
from specdec_kernels.ops.topk_logprobs import topk_logprobs
from specdec_kernels.tree import PADDING_PARENT, Decision, DraftTree


class Reader(Protocol):
    kv: RaggedKV

    def forward(self, tree: DraftTree) -> Tensor:
        """Logits [B, T, V], the window's K/V behind the rows' prefixes."""


def read(model: Reader, tree: DraftTree) -> Tensor:
    model.kv.reserve(max(model.kv.lens) + tree.width)
    return model.forward(tree)


def chains(ids: Tensor, counts: Sequence[int], draft_logits: Tensor | None = None) -> DraftTree:
    """Rows of counts[b] nodes, each the child of the one before; ids int64 [B, T]."""
    num_nodes = torch.tensor(counts, dtype=torch.int32, device=ids.device)
    slots = torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)
    within = slots < num_nodes[:, None]
    return DraftTree(
        torch.where(within, ids, ids[:, :1]),
        torch.where(within, slots - 1, PADDING_PARENT),
        num_nodes,
        draft_logits=draft_logits,
    )


def with_chances(tree: DraftTree, scores: Tensor) -> DraftTree:
    """A tree that build_tree made of the log probabilities `scores`, and its nodes' chances."""
    ordered = scores.nan_to_num(nan=-torch.inf).sort(1, descending=True).values
    chances = pad(ordered[:, : tree.width - 1].exp(), (1, 0), value=1.0)
    return tree._replace(chances=pad(chances, (0, tree.width - chances.shape[1])))


class BestFirst:
    """Trees of the nodes with the highest cumulative log probability.

    A level costs one forward: of the best trees so far, whose newest leaves then get `topk`
    children each. Nodes that drop out of the best trees never come back, so the last trees are the
    best of all that could have grown.

    max_nodes, max_depth: of each row; 0 nodes is a row that has no part. min_depth: trees of fewer
    levels are cut down to their roots. least: log probability below which a token is not drafted.
    """

    def __init__(
        self,
        model: Reader,
        topk: int,
        max_nodes: Sequence[int],
        max_depth: Sequence[int],
        *,
        min_depth: int,
        least: float,
        eos_token_ids: frozenset[int],
    ):
        self.model, self.topk, self.min_depth, self.least = model, topk, min_depth, least
        most = sum(topk**level for level in range(min(max(max_depth), 16) + 1))
        self.width = min(max(max_nodes), most)
        device = model.kv.prefix_len.device
        self.max_nodes = torch.tensor(max_nodes, dtype=torch.int32, device=device)
        self.max_depth = torch.tensor(max_depth, dtype=torch.int32, device=device)[:, None]
        self.ends = torch.tensor(sorted(eos_token_ids), dtype=torch.int64, device=device)

    def grow(self, roots: Tensor, logits: Tensor) -> tuple[DraftTree, DraftTree | None]:
        """From roots int64 [B] and the logits [B, V] behind them: trees, and what was read last."""
        window = None
        drafting = self.max_depth[:, 0] > 0
        self.scores, self.token_ids = self._children(logits, drafting)
        self.parents = torch.full_like(self.token_ids, -1, dtype=torch.int32)
        self.levels = torch.ones_like(self.parents[:1])
        for level in range(1, int(self.max_depth.max())):
            # The last level is not read: there may be no position for it.
            scores = self.scores.masked_fill(self.levels >= self.max_depth, -torch.inf)
            tree = self._tree(roots, scores, self.max_nodes * drafting)
            leaves = (tree.depth == level) & ~torch.isin(tree.draft_token_ids, self.ends)
            if not bool(leaves.any()):
                break
            window = tree
            self._expand(read(self.model, window), scores, leaves)
        tree = self._tree(roots, self.scores, self.max_nodes)
        short = torch.tensor(tree.drafted_depth(), device=roots.device) < self.min_depth
        if bool(short.any()):
            most = torch.where(short, self.max_nodes.clamp(max=1), self.max_nodes)
            tree = self._tree(roots, self.scores, most)
        return tree, window

    def _tree(self, roots: Tensor, scores: Tensor, max_nodes: Tensor) -> DraftTree:
        return build_tree(
            roots, self.token_ids, scores, self.parents, max_nodes=max_nodes, width=self.width
        )

    def _expand(self, logits: Tensor, scores: Tensor, leaves: Tensor) -> None:
        """Adds the children of the slots `leaves`, bool [B, T], of the tree that `scores` gave."""
        # The candidate in slot 1 is the best one, and so on: the order of build_tree.
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, : self.width - 1]
        order = pad(order, (0, self.width - 1 - order.shape[1]))
        above = pad(scores.gather(1, order), (1, 0))
        logprobs, token_ids = self._children(logits.flatten(0, 1), leaves.flatten())
        below = (above[..., None] + logprobs.view(*leaves.shape, -1)).flatten(1)
        parents = pad(order, (1, 0), value=-1).int().repeat_interleave(self.topk, 1)
        self.scores = torch.cat([self.scores, below], 1)
        self.token_ids = torch.cat([self.token_ids, token_ids.view(below.shape)], 1)
        self.parents = torch.cat([self.parents, parents], 1)
        level = self.levels.amax() + 1
        self.levels = torch.cat([self.levels, level.expand(1, below.shape[1])], 1)

    def _children(self, logits: Tensor, grows: Tensor) -> tuple[Tensor, Tensor]:
        """Log probabilities and ids [N, k] of the best tokens; -infinity is none."""
        logprobs, token_ids, _ = topk_logprobs(logits, self.topk)
        kept = grows[:, None] & (logprobs >= self.least)
        return logprobs.masked_fill(~kept, -torch.inf), token_ids


def slots_in(window: DraftTree, tree: DraftTree, decision: Decision) -> tuple[Tensor, list[int]]:
    """Where the kept slots of `tree` stand in `window`, as far down as that goes.

    Returns a path int32 [B, T], root first, and how much of it counts in each row.
    """
    path, counts = torch.full_like(window.parents, -1), []
    tokens, parents = window.draft_token_ids.tolist(), window.parents.tolist()
    for b, nodes in enumerate(window.num_nodes.tolist()):
        slot_of = {(parents[b][s], tokens[b][s]): s for s in range(1, nodes)}
        kept = decision.path[b, 1 : decision.num_kept[b]].long()
        slots = [0] if nodes and decision.num_kept[b] else []
        for token in tree.draft_token_ids[b, kept].tolist():
            slot = slot_of.get((slots[-1], token))
            if slot is None:
                break
            slots.append(slot)
        path[b, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
        counts.append(len(slots))
    return path, counts
