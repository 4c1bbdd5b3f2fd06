"""Several drafters at once: merged into one tree, or asked one after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from specdec_kernels.drafting import CLASSES, Drafter
from specdec_kernels.drafting.acceptance import Reliability
from specdec_kernels.drafting.merging import (
    Merged,
    Node,
    Row,
    merge_nodes,
    nodes_of,
    outcomes,
    tree_of,
)
from specdec_kernels.tree import Decision, DraftTree, SamplingParams, roots_of


class CombinedDrafter:
    """Drafters by name, the first preferred.

    merge: True merges what all of them draft for a row into one tree of the tokens that are
        likeliest to be accepted, as each drafter holds and as its chances proved in this row so
        far; False takes the first drafter that has anything for the row.
    record: told per row and drafter, after each verification, how deep that one had drafted and how
        many of its tokens were kept; a token that several drafted counts for each, one that found
        no room for none.
    """

    def __init__(
        self,
        parts: Mapping[str, Drafter],
        *,
        merge: bool,
        record: Callable[[str, int, int], None] | None = None,
    ):
        self.parts = dict(parts)
        self.merge = merge
        self.record = record
        self.hidden_layers: Sequence[int] = tuple(
            dict.fromkeys(layer for part in parts.values() for layer in part.hidden_layers)
        )
        self._classes: dict[str, list[int]] = {}
        self._trees: dict[str, DraftTree] = {}
        self._rows: list[Merged] = []
        self._drafts: list[dict[str, list[Node]]] = []
        self._lens: list[int] = []
        self._reliability: dict[tuple[str, int], Reliability] = defaultdict(Reliability)

    def begin(self, tokens: Tensor, lens: Tensor, features: Tensor | None) -> None:
        self._drafts = []
        self._reliability.clear()
        for name, part in self.parts.items():
            part.begin(tokens, lens, self._features_of(name, features))

    def end(self, tokens: Tensor, lens: Tensor) -> None:
        for part in self.parts.values():
            part.end(tokens, lens)

    def confidence(self, tokens: Tensor, lens: Tensor) -> list[int]:
        """The class of each row's surest drafter; every drafter has CLASSES of its own."""
        if self.merge:
            self._learn(tokens, lens)
        self._classes = {name: part.confidence(tokens, lens) for name, part in self.parts.items()}
        return [self._class(b) for b in range(tokens.shape[0])]

    def propose(
        self,
        tokens: Tensor,
        lens: Tensor,
        sampling: SamplingParams | None,
        max_nodes: Sequence[int],
        max_depth: Sequence[int],
    ) -> DraftTree:
        orders = [self._order(b)[: None if self.merge else 1] for b in range(len(max_nodes))]
        for name, part in self.parts.items():
            nodes = [
                most if name in order else min(most, 1)
                for most, order in zip(max_nodes, orders, strict=True)
            ]
            self._trees[name] = part.propose(tokens, lens, sampling, nodes, max_depth)
        lists = {name: nodes_of(tree, self._classes[name]) for name, tree in self._trees.items()}
        self._lens = lens.tolist()
        self._drafts = [{name: lists[name][b] for name in order} for b, order in enumerate(orders)]
        drafted = [name for name, tree in self._trees.items() if any(tree.drafted_depth())]
        if len(drafted) == 1:  # handed on as it is: it may have been drawn
            self._rows = [_alone(drafted[0], nodes) for nodes in lists[drafted[0]]]
            return self._trees[drafted[0]]
        roots = roots_of(tokens, lens).tolist()
        self._rows = [
            merge_nodes(root, self._weighed(b), most)
            for b, (root, most) in enumerate(zip(roots, max_nodes, strict=True))
        ]
        return tree_of([merged.row for merged in self._rows], tokens.device)

    def commit(self, decision: Decision, features: Tensor | None) -> None:
        for name, tree in self._trees.items():
            own = self._own(name, tree, decision)
            if self.record is not None:
                drafted = [row.depth(name) for row in self._rows]
                for depth, accepted, kept in zip(
                    drafted, own.num_accepted, decision.num_kept, strict=True
                ):
                    if depth > 0:
                        self.record(name, depth, min(accepted, kept))
            hidden = self._features_of(name, features)
            if hidden is not None:
                hidden = torch.cat(
                    [self._in_own_slots(name, tree, hidden), along(decision.path, hidden)], 1
                )
                own = self._to_the_end(tree, decision, own)
            self.parts[name].commit(own, hidden)

    def _weighed(self, b: int) -> dict[str, list[Node]]:
        """What row b's drafters drafted, with what their chances are worth."""

        def weigh(name: str, nodes: Sequence[Node]) -> list[Node]:
            worth = self._reliability[name, b].of
            return [Node(token, parent, worth(chance)) for token, parent, chance in nodes]

        return {name: weigh(name, nodes) for name, nodes in self._drafts[b].items()}

    def _learn(self, tokens: Tensor, lens: Tensor) -> None:
        """From the tokens that came since the last proposals, found room or not."""
        for b, (drafts, length) in enumerate(zip(self._drafts, lens.tolist(), strict=False)):
            new = tokens[b, self._lens[b] : length].tolist()
            for name, nodes in drafts.items():
                for chance, right in outcomes(nodes, new):
                    self._reliability[name, b].record(chance, right)

    def _class(self, b: int) -> int:
        order = self._order(b)
        if not order:
            return 0
        return CLASSES * list(self.parts).index(order[0]) + self._classes[order[0]][b]

    def _order(self, b: int) -> list[str]:
        """The drafters that have something for row b, those to be drafted from first in front."""
        able = [name for name in self.parts if self._classes[name][b] > 0]
        return sorted(able, key=lambda name: -self._classes[name][b]) if self.merge else able

    def _features_of(self, name: str, features: Tensor | None) -> Tensor | None:
        """Those of the layers that one drafter wants, [..., n]."""
        layers = tuple(self.parts[name].hidden_layers)
        if features is None or not layers or layers == self.hidden_layers:
            return features if layers else None
        by_layer = features.unflatten(-1, (len(self.hidden_layers), -1))
        return by_layer[..., [self.hidden_layers.index(layer) for layer in layers], :].flatten(-2)

    def _in_own_slots(self, name: str, tree: DraftTree, features: Tensor) -> Tensor:
        """From the slots of the combined tree to those of one drafter's."""
        slots = torch.zeros_like(tree.draft_token_ids)
        for b, row in enumerate(self._rows):
            own = row.slots.get(name, ())
            slots[b, : len(own)] = torch.tensor(own, dtype=torch.int64).clamp(min=0)
        return along(slots, features)

    def _to_the_end(self, tree: DraftTree, decision: Decision, own: Decision) -> Decision:
        """For who wants hidden states: also what others drafted, in slots behind `tree`."""
        places = torch.arange(decision.path.shape[1], dtype=torch.int32, device=tree.parents.device)
        path = torch.where(decision.path < 0, -1, tree.width + places)
        mine = own.path[:, : path.shape[1]]
        path[:, : mine.shape[1]] = torch.where(mine < 0, path[:, : mine.shape[1]], mine)
        return Decision(path, own.num_accepted, decision.num_kept)

    def _own(self, name: str, tree: DraftTree, decision: Decision) -> Decision:
        """`decision` in the slots of one drafter's tree, as far down as it had drafted the same."""
        path, accepted, kept = torch.full_like(tree.parents, -1), [], []
        for b, row in enumerate(self._rows):
            own_slots = {slot: own for own, slot in enumerate(row.slots.get(name, [0]))}
            own: list[int] = []
            for slot in decision.path[b, : max(decision.num_accepted[b] + 1, 0)].tolist():
                if slot not in own_slots:
                    break
                own.append(own_slots[slot])
            path[b, : len(own)] = torch.tensor(own, dtype=torch.int32)
            accepted.append(len(own) - 1)
            kept.append(min(len(own), decision.num_kept[b]))
        return Decision(path, accepted, kept)


def along(path: Tensor, features: Tensor) -> Tensor:
    """The features [B, T, n] of the slots of a path [B, T], in its order."""
    slots = path.long().clamp(min=0)
    return features.gather(1, slots[..., None].expand(-1, -1, features.shape[-1]))


def _alone(name: str, nodes: Sequence[Node]) -> Merged:
    row = Row([n.token for n in nodes], [n.parent for n in nodes], [n.chance for n in nodes])
    return Merged(row, {name: [*range(len(nodes))]})
