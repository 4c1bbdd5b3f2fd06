"""Drafters combined: one tree from many, or the first that has a draft."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_kernels.drafting.acceptance import Reliability
from specdec_kernels.drafting.combined import CombinedDrafter
from specdec_kernels.drafting.merging import Node, merge_nodes, nodes_of, outcomes
from specdec_kernels.ops.verify_greedy import verify_greedy
from specdec_kernels.tree import Decision, DraftTree


class Scripted:
    """Drafts given trees, and notes what it is told."""

    hidden_layers = ()

    def __init__(self, classes, trees, layers=()):
        self.classes, self.trees, self.hidden_layers = classes, trees, layers
        self.begun, self.ended, self.asked, self.told, self.features = 0, 0, [], [], []

    def begin(self, tokens, lens, features):
        self.begun += 1
        self.features.append(features)

    def end(self, tokens, lens):
        self.ended += 1

    def confidence(self, tokens, lens):
        return self.classes

    def propose(self, tokens, lens, sampling, max_nodes, max_depth):
        self.asked.append(list(max_nodes))
        rows = [tree[:n] for tree, n in zip(self.trees, max_nodes, strict=True)]
        self.tree = DraftTree.from_lists(
            [[token for token, _ in row] for row in rows], [[p for _, p in row] for row in rows]
        )
        return self.tree

    def commit(self, decision, features):
        self.told.append(decision)
        self.features.append(features)


def pairs_of(tree):
    """Per row the tokens and parents of its nodes."""
    return [[node[:2] for node in row] for row in nodes_of(tree, [1] * len(tree.num_nodes))]


def chain(*tokens):
    return [(token, i - 1) for i, token in enumerate(tokens)]


TEXT = torch.tensor([[5, 1], [5, 2], [5, 3]], dtype=torch.int32)
LENS = torch.tensor([2, 2, 2], dtype=torch.int32)


def combine(merge, record=None):
    first = Scripted([2, 0, 0], [chain(1, 7, 8), chain(2), chain(3)], layers=(4, 2))
    second = Scripted([3, 1, 0], [chain(1, 7, 9, 9), chain(2, 6), chain(3)], layers=(2, 9))
    return first, second, CombinedDrafter({"a": first, "b": second}, merge=merge, record=record)


def test_merged_rows_share_what_both_drafted():
    _, _, both = combine(merge=True)
    assert both.hidden_layers == (4, 2, 9)
    assert both.confidence(TEXT, LENS) == [4 + 3, 4 + 1, 0]
    tree = both.propose(TEXT, LENS, None, [20, 20, 1], [9, 9, 9])
    assert pairs_of(tree) == [
        [(1, -1), (7, 0), (9, 1), (9, 2), (8, 1)],
        [(2, -1), (6, 0)],
        [(3, -1)],
    ]
    assert tree.draft_logits is None


def test_the_first_that_has_a_draft_serves_a_row():
    first, second, order = combine(merge=False)
    assert order.confidence(TEXT, LENS) == [2, 4 + 1, 0]
    tree = order.propose(TEXT, LENS, None, [20, 20, 20], [9, 9, 9])
    assert pairs_of(tree) == [[(1, -1), (7, 0), (8, 1)], [(2, -1), (6, 0)], [(3, -1)]]
    assert first.asked == [[20, 1, 1]] and second.asked == [[1, 20, 1]]


def test_a_tree_of_one_drafter_is_handed_on_as_it_is():
    first, second, order = combine(merge=False)
    first.classes, second.classes = [1, 1, 1], [1, 1, 1]
    order.confidence(TEXT, LENS)
    assert order.propose(TEXT, LENS, None, [20, 20, 0], [9, 9, 9]) is first.tree
    path = torch.tensor([[0, 1, 2], [0, -1, -1], [-1, -1, -1]])
    order.commit(Decision(path, [2, 0, -1], [3, 1, 0]), None)
    mine, other = first.told[0], second.told[0]
    assert torch.equal(mine.path, path)
    assert (mine.num_accepted, mine.num_kept) == ([2, 0, -1], [3, 1, 0])
    assert other.path.tolist() == [[0], [0], [-1]]
    assert (other.num_accepted, other.num_kept) == ([0, 0, -1], [1, 1, 0])


def test_every_drafter_hears_of_its_own_slots():
    """A token that both drafted counts for both; one that was cut with the text does not."""
    notes = []
    first, second, both = combine(merge=True, record=lambda *note: notes.append(note))
    both.confidence(TEXT, LENS)
    tree = both.propose(TEXT, LENS, None, [20, 20, 1], [9, 9, 9])
    path = torch.full_like(tree.parents, -1)
    path[0, :4] = torch.tensor([0, 1, 2, 3])
    path[1:, 0] = 0
    both.commit(Decision(path, [3, 0, 0], [2, 1, 1]), None)
    assert first.told[0].path[0].tolist() == [0, 1, -1]
    assert (first.told[0].num_accepted, first.told[0].num_kept) == ([1, 0, 0], [2, 1, 1])
    assert second.told[0].path[0].tolist() == [0, 1, 2, 3]
    assert (second.told[0].num_accepted, second.told[0].num_kept) == ([3, 0, 0], [2, 1, 1])
    assert notes == [("a", 2, 1), ("b", 3, 2), ("b", 1, 0)]


def test_every_drafter_gets_the_hidden_states_of_its_layers_in_its_slots():
    """Of a merged tree: layer l of slot s is 100 l + s, two columns wide."""
    first, second, both = combine(merge=True)

    def features(batch, size):
        by_layer = (
            torch.tensor(both.hidden_layers)[:, None] * 100 + torch.arange(size)[:, None, None]
        )
        return by_layer.expand(batch, size, -1, 2).flatten(2)

    both.begin(TEXT, LENS, features(3, 2))
    both.confidence(TEXT, LENS)
    tree = both.propose(TEXT, LENS, None, [20, 20, 1], [9, 9, 9])
    path = torch.full_like(tree.parents, -1)
    path[:, 0] = 0
    path[0, 1:4] = torch.tensor([1, 2, 3])
    both.commit(Decision(path, [3, 0, 0], [3, 1, 1]), features(3, tree.width))
    for part in (first, second):
        assert part.features[0][1, :, ::2].tolist() == [
            [100 * layer + slot for layer in part.hidden_layers] for slot in range(2)
        ]
    assert first.features[1][0, :3, 1].tolist() == [400, 401, 404]
    assert second.features[1][0, :4, 0].tolist() == [200, 201, 202, 203]
    assert second.features[1][1, :2, 3].tolist() == [900, 901]
    for part, slots in ((first, [0, 1, 5, 6]), (second, [0, 1, 2, 3])):
        told = part.told[0]
        assert told.path[0, :4].tolist() == slots and told.num_kept == [3, 1, 1]
        assert part.features[1][0, slots, 0].tolist() == [
            100 * part.hidden_layers[0] + slot for slot in range(4)
        ]
    assert first.told[0].num_accepted == [1, 0, 0]


def test_a_drafter_that_wants_no_hidden_states_gets_none():
    first, second, both = combine(merge=False)
    first.hidden_layers = ()
    both.begin(TEXT, LENS, torch.zeros(3, 2, 6))
    assert first.features == [None] and second.features[0].shape == (3, 2, 4)


def test_no_draft_at_all():
    first, second, both = combine(merge=True)
    first.classes = second.classes = [0, 0, 0]
    assert both.confidence(TEXT, LENS) == [0, 0, 0]
    tree = both.propose(TEXT, LENS, None, [1, 0, 1], [9, 9, 9])
    assert tree.num_nodes.tolist() == [1, 0, 1] and first.asked == second.asked == [[1, 0, 1]]
    path = torch.tensor([[0], [-1], [0]], dtype=torch.int32)
    both.commit(Decision(path, [0, -1, 0], [1, 0, 1]), None)
    for part in (first, second):
        assert part.told[0].path.tolist() == [[0], [-1], [0]] and part.told[0].num_kept == [1, 0, 1]


def test_begin_and_end_reach_all():
    first, second, both = combine(merge=True)
    both.begin(TEXT, LENS, None)
    both.end(TEXT, LENS)
    assert [(part.begun, part.ended) for part in (first, second)] == [(1, 1), (1, 1)]


@st.composite
def drafts(draw):
    def tree():
        size = draw(st.integers(1, 9))
        return [Node(9, -1)] + [
            Node(draw(st.integers(0, 3)), draw(st.integers(0, i)), draw(st.floats(0, 1)))
            for i in range(size - 1)
        ]

    return {name: distinct(tree()) for name in draw(st.sampled_from(["a", "ab", "abc"]))}


def distinct(nodes):
    """Without the nodes that repeat a sibling, or hang on one that does."""
    kept, slots, seen = [], {-1: -1}, set()
    for i, (token, parent, chance) in enumerate(nodes):
        if parent in slots and (slots[parent], token) not in seen:
            seen.add((slots[parent], token))
            slots[i] = len(kept)
            kept.append(Node(token, slots[parent], chance))
    return kept


def paths(tokens, parents):
    found = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def paths_of(nodes):
    return paths([node.token for node in nodes], [node.parent for node in nodes])


@given(drafts(), st.integers(0, 30))
def test_merged_trees_hold_the_likeliest_paths_of_their_parts(parts, room):
    row, slots = merge_nodes(9, parts, room)
    merged = paths(row.tokens, row.parents)
    given_by = {}  # the best chance that a drafter gives the path's last token
    for nodes in parts.values():
        for path, node in zip(paths_of(nodes), nodes, strict=True):
            given_by[path] = max(given_by.get(path, 0.0), node.chance)
    chances = {}
    for path in sorted(given_by, key=len):
        chances[path] = chances.get(path[:-1], 1.0) * given_by[path]
    assert len(set(merged)) == len(merged) == min(room, len(chances)) and set(merged) <= set(
        chances
    )
    assert row.chances == pytest.approx([chances[path] for path in merged])
    left = [chance for path, chance in chances.items() if path not in merged]
    assert max(left, default=0.0) <= min(row.chances, default=1.0)
    for name, own in slots.items():
        for path, slot in zip(paths_of(parts[name]), own, strict=True):
            assert slot < 0 or merged[slot] == path
            assert slot >= 0 or path not in merged


@pytest.mark.parametrize("room", [3, 5, 9, 17])
def test_equal_drafts_share_the_room(room):
    parts = {
        name: [Node(9, -1), *(Node(t, i, 0.8) for i, t in enumerate(range(start, start + 30)))]
        for name, start in (("a", 0), ("b", 50))
    }
    _, slots = merge_nodes(9, parts, room)
    of_a, of_b = (sum(slot > 0 for slot in slots[name]) for name in "ab")
    assert of_a == of_b == (room - 1) // 2


def test_a_drafter_that_is_always_right_gets_nearly_all_the_room():
    """Both claim the same; after some steps what became of it decides, in each row alone."""
    right, wrong = Scripted([3, 3], []), Scripted([3, 3], [])
    both = CombinedDrafter({"wrong": wrong, "right": right}, merge=True)
    text = torch.arange(400, dtype=torch.int32).repeat(2, 1)
    shares = []
    for length in range(5, 300, 5):
        root, behind = length - 1, range(length, length + 12)
        true, false = chain(root, *behind), chain(root, *(9000 + t for t in behind))
        right.trees, wrong.trees = [true, false], [false, true]
        lens = torch.tensor([length, length], dtype=torch.int32)
        both.confidence(text, lens)
        tree = both.propose(text, lens, None, [9, 9], [12, 12])
        assert tree.num_nodes.tolist() == [9, 9]
        shares.append([sum(t < 9000 for t in row[1:]) for row in tree.draft_token_ids.tolist()])
    assert shares[0] == [4, 4]
    assert all(min(share) >= 7 for share in shares[20:])


def test_reliability_moves_from_the_claim_to_what_was_seen():
    known = Reliability()
    assert [known.of(c) for c in (0.0, 0.5, 1.0)] == [0.0, 0.5, 1.0]
    for i in range(40):
        known.record(0.5, i % 4 == 0)
    assert known.of(0.5) == pytest.approx(0.25, abs=0.08)
    assert known.of(0.9) == 0.9  # of such chances nothing is known
    for _ in range(200):
        known.record(0.5, True)
    assert known.of(0.5) > 0.9


def test_outcomes_are_those_of_nodes_whose_parents_were_right():
    """Whether or not they found room; what lies behind the known text is not judged."""
    nodes = [
        Node(9, -1), Node(1, 0, 0.6), Node(2, 0, 0.3), Node(3, 1, 0.5), Node(4, 2, 0.7),
        Node(5, 3, 0.2),
    ]  # fmt: skip
    assert list(outcomes(nodes, [1, 3])) == [(0.6, True), (0.3, False), (0.5, True)]
    assert list(outcomes(nodes, [2, 8, 8])) == [(0.6, False), (0.3, True), (0.7, False)]
    assert list(outcomes(nodes, [])) == [] and list(outcomes(nodes[:1], [1])) == []


def test_siblings_without_chances_share_that_of_the_class():
    tree = DraftTree.from_lists([[9, 1, 2, 3], [9]], [[-1, 0, 0, 1], [-1]])
    rows = nodes_of(tree, [3, 0])
    assert [n.chance for n in rows[0][1:]] == pytest.approx([0.75, 0.25 * 0.75, 0.75])
    assert len(rows[1]) == 1


def test_verified_trees_keep_the_longest_of_both():
    """What the target says decides which drafter's branch stands, whoever is preferred."""
    first, second, both = combine(merge=True)
    both.confidence(TEXT[:1], LENS[:1])
    first.trees, second.trees = first.trees[:1], second.trees[:1]
    first.classes = second.classes = [1]
    both.confidence(TEXT[:1], LENS[:1])
    tree = both.propose(TEXT[:1], LENS[:1], None, [20], [9])
    after = {1: 7, 7: 9, 9: 9, 8: 0}
    logits = torch.nn.functional.one_hot(
        torch.tensor([[after[t] for t in tree.draft_token_ids[0].tolist()]]), 10
    ).float()
    acceptance = verify_greedy(logits, tree.draft_token_ids, tree.parents, tree.num_nodes)
    assert acceptance.output_token_ids[0].tolist()[:4] == [7, 9, 9, 9]
