"""Trees of an EAGLE head: the best `topk` nodes of every level have `topk` children each.

Source: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_kernels.drafting.recurrent import RecurrentRun
from specdec_kernels.ops.build_tree import build_tree
from specdec_kernels.ops.topk_logprobs import topk_logprobs
from specdec_kernels.tree import ROOT_PARENT, DraftTree


class Expansion:
    """Grows the trees of one step; every level is one forward of the head.

    The level ends the growth when none of its nodes is among the best `max_nodes`, as no later one
    could be. max_nodes, max_depth: of each row; depth 0 is a row that has no part. min_depth: trees
    of fewer levels are cut down to their roots. least: log probability below which a token is not
    drafted.
    """

    def __init__(
        self,
        run: RecurrentRun,
        topk: int,
        max_nodes: Sequence[int],
        max_depth: Sequence[int],
        *,
        min_depth: int,
        least: float,
        eos_token_ids: frozenset[int],
    ):
        self.run, self.topk, self.min_depth, self.least = run, topk, min_depth, least
        levels = max(max(max_depth), 1)
        self.width = min(max(max_nodes), 1 + topk + (levels - 1) * topk * topk)
        device = run.carry.device
        self.max_nodes = torch.tensor(max_nodes, dtype=torch.int32, device=device)
        self.max_depth = torch.tensor(max_depth, dtype=torch.int32, device=device)[:, None]
        self.ends = torch.tensor(sorted(eos_token_ids), dtype=torch.int64, device=device)

    def grow(self, roots: Tensor, logits: Tensor) -> DraftTree:
        """From roots int64 [B] and the logits [B, Vd] behind them; the cache ends as it began."""
        prefix, prefix_len = list(self.run.kv.lens), self.run.kv.prefix_len.clone()
        scores, token_ids = self._children(logits, self.max_depth[:, 0] > 0)
        self.scores, self.token_ids = scores, token_ids
        self.parents = torch.full_like(token_ids, -1, dtype=torch.int32)
        # The newest level: its candidates, their parents' places in the level before.
        newest = torch.arange(self.topk, device=roots.device).expand(len(roots), -1)
        places = torch.zeros_like(newest)
        hidden = self.run.carry[:, None]
        nothing = places.new_empty(len(roots), 0)
        window = DraftTree(
            nothing, nothing.int(), self.max_nodes, nothing[..., None], nothing.int()
        )
        for level in range(1, int(self.max_depth.max())):
            grows = self._worth_reading(newest) & (self.max_depth > level)
            if not bool(grows.any()):
                break
            window = self._window(window, token_ids, places, grows)
            before = window.width - self.topk
            self.run.kv.set_lens([n + before for n in prefix])
            self.run.kv.reserve(max(prefix) + window.width)
            given = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[2]))
            logits, hidden = self.run.expand(given, window, prefix_len)
            newest, places = self._add(logits, newest, grows)
            token_ids = self.token_ids.gather(1, newest)
        self.run.kv.set_lens(prefix)
        return self._tree(roots)

    def _add(self, logits: Tensor, newest: Tensor, grows: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the children of the level `newest`, and returns the best of them and their places.

        logits: [B, K, Vd].
        """
        rows, first = len(newest), self.scores.shape[1]
        logprobs, token_ids = self._children(logits.flatten(0, 1), grows.flatten())
        scores = self.scores.gather(1, newest)[..., None] + logprobs.view(rows, self.topk, -1)
        self.scores = torch.cat([self.scores, scores.flatten(1)], 1)
        self.token_ids = torch.cat([self.token_ids, token_ids.view(rows, -1)], 1)
        parents = newest.repeat_interleave(self.topk, 1).int()
        self.parents = torch.cat([self.parents, parents], 1)
        order = scores.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, : self.topk]
        return first + order, order // self.topk

    def _children(self, logits: Tensor, grows: Tensor) -> tuple[Tensor, Tensor]:
        """Log probabilities and target ids [N, K] of the best tokens; -infinity is none."""
        logprobs, token_ids, _ = topk_logprobs(logits, self.topk)
        kept = grows[:, None] & (logprobs >= self.least)
        token_ids = token_ids.clamp(min=0)
        if self.run.network.target_ids is not None:
            token_ids = self.run.network.target_ids[token_ids]
        return logprobs.masked_fill(~kept, -torch.inf), token_ids

    def _worth_reading(self, newest: Tensor) -> Tensor:
        """Which of the candidates `newest` may have children in the final trees."""
        ordered = self.scores.sort(1, descending=True).values
        last = (self.max_nodes.long() - 2).clamp(0, ordered.shape[1] - 1)[:, None]
        scores = self.scores.gather(1, newest)
        ends = torch.isin(self.token_ids.gather(1, newest), self.ends)
        return (scores >= ordered.gather(1, last)) & scores.isfinite() & ~ends

    def _window(
        self, older: DraftTree, token_ids: Tensor, places: Tensor, grows: Tensor
    ) -> DraftTree:
        """The levels read so far and the newest one, whose parents stand at `places` of the last.

        The roots are in the cache: the first level has depth 0.
        """
        assert older.tree_mask is not None and older.depth is not None
        before, size = older.width, self.topk
        slots = torch.arange(before, before + size, device=token_ids.device)
        num_words = (before + size + 63) // 64
        known = pad(older.tree_mask, (0, num_words - older.tree_mask.shape[2]))
        if before:
            above = before - size + places
            words = known.gather(1, above[..., None].expand(-1, -1, num_words))
            depth = older.depth.gather(1, above) + 1
        else:
            above = torch.full_like(places, ROOT_PARENT)
            words = known.new_zeros(*places.shape, num_words)
            depth = torch.zeros_like(places, dtype=torch.int32)
        words[:, torch.arange(size), slots // 64] |= torch.ones_like(slots) << (slots % 64)
        return DraftTree(
            torch.cat([older.draft_token_ids, token_ids], 1),
            torch.cat([older.parents, above.int()], 1),
            torch.where(grows.any(1), before + size, 0).int(),
            torch.cat([known, words], 1),
            torch.cat([older.depth, depth], 1),
        )

    def _tree(self, roots: Tensor) -> DraftTree:
        def best(max_nodes: Tensor) -> DraftTree:
            return build_tree(
                roots,
                self.token_ids,
                self.scores,
                self.parents,
                max_nodes=max_nodes,
                width=self.width,
            )

        tree = best(self.max_nodes)
        assert tree.depth is not None
        short = tree.depth.amax(1) < self.min_depth
        return best(torch.where(short, self.max_nodes.clamp(max=1), self.max_nodes))
