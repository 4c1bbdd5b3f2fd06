"""Trees from several drafts: the room goes to the tokens that are likeliest to be accepted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from specdec_kernels.drafting import CLASS_CHANCES
from specdec_kernels.tree import ROOT_PARENT, DraftTree

TINY = 1e-9


class Node(NamedTuple):
    """parent: its place in the same draft, in front. chance: of being right where the parent is."""

    token: int
    parent: int
    chance: float = 1.0


class Row(NamedTuple):
    """One row of a tree in slot order; chances: see DraftTree."""

    tokens: list[int]
    parents: list[int]
    chances: list[float]


def tree_of(rows: Sequence[Row], device: torch.device) -> DraftTree:
    return DraftTree.from_lists(
        [row.tokens for row in rows],
        [row.parents for row in rows],
        [row.chances for row in rows],
        device=device,
    )


class Trie:
    """Continuations of one root, a node for each that differs; parents come first."""

    def __init__(self, root: int):
        self.tokens, self.parents, self.given = [root], [ROOT_PARENT], [1.0]
        self._children: dict[tuple[int, int], int] = {}
        self._leaves = [True]

    def is_leaf(self, node: int) -> bool:
        return self._leaves[node]

    def find(self, parent: int, token: int) -> int | None:
        return self._children.get((parent, token))

    def put(self, parent: int, token: int, chance: float) -> int:
        """A node, which may be there. chance: see Node; the best one that is given counts."""
        node = self._children.setdefault((parent, token), len(self.tokens))
        if node < len(self.tokens):
            self.given[node] = max(self.given[node], chance)
            return node
        self.tokens.append(token)
        self.parents.append(parent)
        self.given.append(chance)
        self._leaves[parent] = False
        self._leaves.append(True)
        return node

    def cut(self, max_nodes: int) -> tuple[Row, dict[int, int]]:
        """The tree of the nodes that are likeliest to be accepted, and their slots."""
        chances = [1.0]
        for parent, given in zip(self.parents[1:], self.given[1:], strict=True):
            chances.append(chances[parent] * given)
        # Sorting is stable, and no chance above the parent's: a parent stays in front.
        kept = sorted(range(len(chances)), key=lambda node: -chances[node])[: max(max_nodes, 0)]
        slots = {node: slot for slot, node in enumerate(kept)}
        return Row(
            [self.tokens[node] for node in kept],
            [slots.get(self.parents[node], ROOT_PARENT) for node in kept],
            [chances[node] for node in kept],
        ), slots


class Merged(NamedTuple):
    """slots: per drafter those of its own nodes, -1 where a node found no room."""

    row: Row
    slots: dict[str, list[int]]

    def depth(self, name: str) -> int:
        """Levels below the root that a drafter's nodes reach."""
        depths = [0]
        for parent in self.row.parents[1:]:
            depths.append(depths[parent] + 1)
        return max((depths[slot] for slot in self.slots.get(name, ()) if slot >= 0), default=0)


def merge_nodes(root: int, drafts: Mapping[str, Sequence[Node]], max_nodes: int) -> Merged:
    """Merges drafts of `root`, their roots included, into one tree of at most max_nodes nodes."""
    trie = Trie(root)
    places: dict[str, list[int]] = {}
    for name, nodes in drafts.items():
        own = places[name] = [0]
        for token, parent, chance in nodes[1:]:
            own.append(trie.put(own[parent], token, chance))
    row, slots = trie.cut(max_nodes)
    return Merged(row, {name: [slots.get(at, -1) for at in own] for name, own in places.items()})


def nodes_of(tree: DraftTree, classes: Sequence[int]) -> list[list[Node]]:
    """Per row the nodes of a tree, the root included, with chances given that of the parent.

    classes: of confidence, by which siblings share where the drafter could not tell chances.
    """
    tokens, parents = tree.draft_token_ids.tolist(), tree.parents.tolist()
    chances = None if tree.chances is None else tree.chances.tolist()
    rows = []
    for b, n in enumerate(tree.num_nodes.tolist()):
        if chances is not None:
            own = chances[b]
            given = [own[i] / max(own[max(parents[b][i], 0)], TINY) for i in range(n)]
        else:
            given = _by_class(parents[b][:n], CLASS_CHANCES[classes[b] - 1])
        rows.append([*map(Node._make, zip(tokens[b], parents[b], given, strict=False))])
    return rows


def _by_class(parents: Sequence[int], chance: float) -> list[float]:
    """The first child is right with `chance`, the next one is if that one is not, and so on."""
    left: dict[int, float] = {}
    given = []
    for parent in parents:
        share = left.get(parent, 1.0)
        given.append(share * chance)
        left[parent] = share * (1.0 - chance)
    return given


def outcomes(nodes: Sequence[Node], following: Sequence[int]) -> Iterator[tuple[float, bool]]:
    """Chances of the nodes whose parents were right, and whether they were, by what followed."""
    children: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        children.setdefault(node.parent, []).append(i)
    at: int | None = 0
    for token in following:
        below, at = children.get(at, ()) if at is not None else (), None
        for i in below:
            yield nodes[i].chance, nodes[i].token == token
            if nodes[i].token == token:
                at = i
