"""Several drafters at once: merged into one tree, or asked one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.drafting import CLASSES, Drafter
from specdec_kernels.tree import ROOT_PARENT, Decision, DraftTree, SamplingParams, roots_of


class Row(NamedTuple):
    """One row of a combined tree.

    tokens, parents: in slot order. slots: per drafter the slot of each of its own nodes, -1 where
    a node found no room.
    """

    tokens: list[int]
    parents: list[int]
    slots: dict[str, list[int]]

    def depth(self, name: str) -> int:
        """Levels below the root that a drafter's nodes reach."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return max((depths[slot] for slot in self.slots.get(name, ()) if slot >= 0), default=0)


class CombinedDrafter:
    """Drafters by name, the first preferred.

    merge: True merges what all of them draft for a row into one tree, the surest one's first; False
        takes the first drafter that has anything for the row.
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
        self._rows: list[Row] = []

    def begin(self, tokens: Tensor, lens: Tensor, features: Tensor | None) -> None:
        for name, part in self.parts.items():
            part.begin(tokens, lens, self._features_of(name, features))

    def end(self, tokens: Tensor, lens: Tensor) -> None:
        for part in self.parts.values():
            part.end(tokens, lens)

    def confidence(self, tokens: Tensor, lens: Tensor) -> list[int]:
        """The class of each row's first drafter; every drafter has CLASSES of its own."""
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
        drafted = [name for name, tree in self._trees.items() if any(tree.drafted_depth())]
        if len(drafted) == 1:  # handed on as it is: it may have been drawn
            tree = self._trees[drafted[0]]
            self._rows = [alone(drafted[0], nodes) for nodes in nodes_of(tree)]
            return tree
        roots = roots_of(tokens, lens).tolist()
        lists = {name: nodes_of(tree) for name, tree in self._trees.items()}
        self._rows = [
            merge_nodes(root, {name: lists[name][b] for name in order}, most)
            for b, (root, order, most) in enumerate(zip(roots, orders, max_nodes, strict=True))
        ]
        return DraftTree.from_lists(
            [row.tokens for row in self._rows],
            [row.parents for row in self._rows],
            device=tokens.device,
        )

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


def alone(name: str, nodes: Sequence[tuple[int, int]]) -> Row:
    return Row(
        [token for token, _ in nodes], [parent for _, parent in nodes], {name: [*range(len(nodes))]}
    )


def nodes_of(tree: DraftTree) -> list[list[tuple[int, int]]]:
    """Per row the tokens and parents of its nodes, the root included."""
    tokens, parents = tree.draft_token_ids.tolist(), tree.parents.tolist()
    return [
        list(zip(tokens[b][:n], parents[b][:n], strict=True))
        for b, n in enumerate(tree.num_nodes.tolist())
    ]


def merge_nodes(root: int, drafts: Mapping[str, Sequence[tuple[int, int]]], max_nodes: int) -> Row:
    """Merges trees that share `root` into one of at most max_nodes nodes.

    drafts: (token, parent) of each node in slot order, roots included, the preferred draft first.
    It gets three quarters of the room, the others share the rest, and what one does not need goes
    to the others in that order.
    """
    if max_nodes < 1:
        return Row([], [], {})
    row = Row([root], [ROOT_PARENT], {name: [-1] * len(nodes) for name, nodes in drafts.items()})
    children: dict[tuple[int, int], int] = {}
    reserved = min((max_nodes - 1) // 4, 4 * (len(drafts) - 1)) if len(drafts) > 1 else 0
    share = reserved // max(len(drafts) - 1, 1)
    for rank, (name, nodes) in enumerate(drafts.items()):
        limit = max_nodes - reserved if rank == 0 else min(len(row.tokens) + share, max_nodes)
        _insert(row, children, name, nodes, limit)
    for name, nodes in drafts.items():
        _insert(row, children, name, nodes, max_nodes)
    return row


def _insert(
    row: Row,
    children: dict[tuple[int, int], int],
    name: str,
    nodes: Sequence[tuple[int, int]],
    limit: int,
) -> None:
    slots = row.slots[name]
    for own, (token, parent) in enumerate(nodes):
        if own == 0:
            slots[0] = 0
            continue
        above = slots[parent]
        if slots[own] >= 0 or above < 0:
            continue
        slot = children.get((above, token))
        if slot is None:
            if len(row.tokens) >= limit:
                continue
            slot = children[above, token] = len(row.tokens)
            row.tokens.append(token)
            row.parents.append(above)
        slots[own] = slot
