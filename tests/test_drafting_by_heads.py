"""The Medusa drafter over heads that say what a test wants."""

import itertools
import math

import pytest
import torch

from specdec_kernels.config import SpeculativeConfig
from specdec_kernels.decoding.controller import AcceptanceModel, Controller, CostModel
from specdec_kernels.drafting.acceptance import SlotAcceptance
from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.drafting.marginals import likely_paths
from specdec_kernels.drafting.medusa import MedusaDrafter
from specdec_kernels.medusa_trees import CHILDREN, named_tree
from specdec_kernels.tree import Decision


class TableHeads:
    """Head i says table[state, i]: probabilities [S, H, V]; a state is its number."""

    hidden_layer = 2

    def __init__(self, table):
        self.table = torch.tensor(table)
        self.number = self.table.shape[1]
        self.cost = DraftCost(0.1, most=self.number)
        self.acceptance = SlotAcceptance()
        self.asked = []

    def logits(self, states, levels):
        self.asked.append((states[:, 0].tolist(), levels))
        rows = self.table[states[:, 0].long()]
        return [rows[:, i].log() for i in range(levels)]


TABLE = [
    [[0.1, 0.5, 0.4, 0.0], [0.0, 0.1, 0.7, 0.2]],
    [[0.3, 0.0, 0.1, 0.6], [0.45, 0.55, 0.0, 0.0]],
]


def propose(drafter, states, max_nodes, max_depth):
    """Trees of rows whose prompt's last states are these, behind roots 9."""
    batch = len(states)
    tokens = torch.full((batch, 4), 9, dtype=torch.int32)
    lens = torch.tensor([4 - b % 2 for b in range(batch)], dtype=torch.int32)
    features = torch.full((batch, 3, 1), math.nan)
    for b, state in enumerate(states):
        features[b, int(lens[b]) - 2] = state
    drafter.begin(tokens, lens, features)
    return drafter.propose(tokens, lens, None, max_nodes, max_depth)


def paths(tree, b):
    """The tokens below the root of every node, in the order of the slots."""
    out = [()]
    for slot in range(1, int(tree.num_nodes[b])):
        out.append((*out[int(tree.parents[b, slot])], int(tree.draft_token_ids[b, slot])))
    return out[1:]


def test_the_likeliest_paths_by_product():
    tree = propose(MedusaDrafter(TableHeads(TABLE), topk=4), [0, 1], [6, 4], [9, 9])
    assert paths(tree, 0) == [(1,), (2,), (1, 2), (2, 2), (0,)]
    assert paths(tree, 1) == [(3,), (3, 1), (0,)]
    assert tree.draft_logits is None and tree.draft_token_ids[:, 0].tolist() == [9, 9]


def test_trees_tell_their_chances():
    drafter = MedusaDrafter(TableHeads(TABLE), topk=4, tells_chances=True)
    tree = propose(drafter, [0, 1], [6, 4], [9, 9])
    assert tree.chances[0].tolist() == pytest.approx([1.0, 0.5, 0.4, 0.35, 0.28, 0.1])
    assert tree.chances[1, :4].tolist() == pytest.approx([1.0, 0.6, 0.33, 0.3])
    tree = propose(MedusaDrafter(TableHeads(TABLE), topk=1, tells_chances=True), [0], [9], [9])
    assert tree.chances.tolist() == [pytest.approx([1.0, 0.5, 0.35])]


def test_chains_have_no_mask():
    tree = propose(MedusaDrafter(TableHeads(TABLE), topk=1), [0, 1, 1], [9, 2, 0], [9, 9, 9])
    assert [paths(tree, b) for b in range(3)] == [[(1,), (1, 2)], [(3,)], []]
    assert tree.tree_mask is None and tree.depth is None and tree.num_nodes.tolist() == [3, 2, 0]


def test_limits_of_rows():
    heads = TableHeads(TABLE)
    tree = propose(MedusaDrafter(heads, topk=4), [0, 1, 0], [9, 9, 9], [1, 0, 1])
    assert [paths(tree, b) for b in range(3)] == [[(1,), (2,), (0,)], [], [(1,), (2,), (0,)]]
    assert tree.width == 4
    assert heads.asked == [([0.0, 1.0, 0.0], 1)]  # no head further than a row may go
    tree = propose(MedusaDrafter(heads, topk=4), [0, 1], [1, 0], [5, 5])
    assert tree.num_nodes.tolist() == [1, 0] and len(heads.asked) == 1


def test_c03_nothing_is_drafted_behind_an_eos():
    tree = propose(
        MedusaDrafter(TableHeads(TABLE), topk=4, eos_token_ids=frozenset({1})), [0], [9], [9]
    )
    assert paths(tree, 0)[:3] == [(1,), (2,), (2, 2)]
    assert all(path[0] != 1 for path in paths(tree, 0) if len(path) > 1)


def test_unlikely_tokens_and_short_trees():
    options = dict(topk=4, p_min=0.42)
    drafter = MedusaDrafter(TableHeads(TABLE), **options)
    tree = propose(drafter, [0, 1], [9, 9], [9, 9])
    assert [paths(tree, b) for b in range(2)] == [[(1,), (1, 2)], [(3,), (3, 1), (3, 0)]]
    assert tree.width == 4
    drafter = MedusaDrafter(TableHeads(TABLE), min_tokens=2, topk=4, p_min=0.65)
    tree = propose(drafter, [0, 1], [9, 9], [9, 9])  # 0.5 and 0.6 are too little
    assert tree.num_nodes.tolist() == [1, 1] and tree.width == 1
    drafter = MedusaDrafter(TableHeads(TABLE), min_tokens=2, topk=4)
    assert propose(drafter, [0], [9], [1]).num_nodes.tolist() == [1]


def test_choices_are_the_tree_that_may_be_drafted():
    choices = SpeculativeConfig(
        method="medusa", model="x", medusa_choices=[[0, 1], [1], [0]]
    ).medusa_choices
    assert choices == ((0,), (1,), (0, 1))
    drafter = MedusaDrafter(TableHeads(TABLE), topk=10, choices=choices)
    tree = propose(drafter, [0, 1], [9, 3], [9, 9])
    assert [paths(tree, b) for b in range(2)] == [[(1,), (2,), (1, 3)], [(3,), (0,)]]


def test_the_next_states_are_those_of_the_last_kept_slots():
    heads = TableHeads(TABLE)
    drafter = MedusaDrafter(heads, topk=4)
    propose(drafter, [0, 0, 0], [6, 6, 6], [9, 9, 9])
    features = torch.tensor([[5, 0, 5, 1, 5, 5], [1, 5, 5, 5, 5, 5], [0, 5, 5, 5, 5, 5]])
    path = torch.full((3, 6), -1, dtype=torch.int32)
    path[0, :3] = torch.tensor([0, 1, 3])
    path[1, 0] = 0
    drafter.commit(Decision(path, [2, 0, -1], [3, 1, 0]), features[..., None].float())
    tokens = torch.full((3, 8), 7, dtype=torch.int32)
    drafter.propose(tokens, torch.tensor([8, 6, 4], dtype=torch.int32), None, [3, 3, 0], [9] * 3)
    assert heads.asked[-1] == ([1.0, 1.0, 0.0], 2)
    chances = heads.acceptance
    assert chances._kept[0] > 0 and chances._kept[2] > 0 and sum(chances._kept) < 2


@pytest.mark.parametrize("nodes, topk, levels", [(1, 3, 2), (5, 2, 4), (12, 10, 3), (40, 4, 5)])
def test_likely_paths_miss_none_of_the_best(nodes, topk, levels):
    g = torch.Generator().manual_seed(nodes)
    found = set(likely_paths(nodes, topk, levels))
    assert len(found) < sum(topk**n for n in range(1, levels + 1)) or nodes >= 30
    for _ in range(40):
        rows = torch.rand(levels, topk, generator=g).double() ** 4
        rows = (rows / rows.sum(1, keepdim=True)).sort(1, descending=True).values.log()
        every = [p for n in range(levels) for p in itertools.product(range(topk), repeat=n + 1)]
        score = {p: sum(float(rows[i, r]) for i, r in enumerate(p)) for p in every}
        best = sorted(every, key=lambda p: -score[p])[:nodes]
        assert found.issuperset(best)


def test_slots_teach_what_smaller_trees_would_have_brought():
    acceptance = SlotAcceptance()
    before = acceptance.expected(8)
    for _ in range(400):
        acceptance.record(8, [1, 4])
    sizes = [acceptance.expected(size) for size in (0, 1, 3, 4, 8, 9)]
    assert sizes[0] == 1 and sizes == sorted(sizes)
    assert sizes[:5] == pytest.approx([1, 2, 2, 3, 3], abs=0.25)
    for _ in range(400):
        acceptance.record(8, [])
    assert acceptance.expected(8) < 1.2 < before < 3


def controller(expected, most, head_cost):
    costs = CostModel()
    for window in (1, 8, 64):
        for _ in range(7):
            costs.record(1, window, 1.0 + 0.01 * window)
    cost = DraftCost(head_cost, most)
    return Controller(
        costs, AcceptanceModel(), fixed=None, largest=48, draft_cost=cost, expected=expected
    )


def test_e01_the_size_follows_what_trees_bring_and_heads_cost():
    saturated = controller(lambda n: 1 + min(n, 8) / 8, 4, 0.05)
    assert saturated.draft_size(1, [3]) == 8
    growing = controller(lambda n: 1 + n / 8, 4, 0.05)
    assert growing.draft_size(1, [3]) == 48
    costly = controller(lambda n: 1 + min(n, 8) / 8, 4, 2.0)
    costly._pause_left[3] = 5
    assert costly.draft_size(1, [3]) == 0


@pytest.mark.parametrize("name", CHILDREN)
def test_trees_of_medusa_by_name(name):
    """63 nodes in each, in four levels or three, no rank above 9; the first head has ten."""
    config = SpeculativeConfig(method="medusa", model="x", medusa_choices=name)
    choices = config.medusa_choices
    assert len(choices) == len(set(choices)) == 63
    assert [len(path) for path in choices] == sorted(len(path) for path in choices)
    assert len(choices[-1]) == (3 if name == "vicuna_33b_stage1" else 4)
    assert max(max(path) for path in choices) == 9
    assert SpeculativeConfig(method="medusa", model="x", medusa_choices=choices) == config


def test_a_tree_of_medusa_with_an_unknown_name():
    with pytest.raises(ValueError, match=r"one of mc_sim_7b_63.*got 'vicuna_7b'"):
        SpeculativeConfig(method="medusa", model="x", medusa_choices="vicuna_7b")
    last = (0, 0, 0, 1), (6, 0), (1, 4)
    assert set(last) < set(named_tree("vicuna_7b_stage2"))
    assert (1, 5) not in named_tree("vicuna_7b_stage2")
