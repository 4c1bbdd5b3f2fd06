"""The loop without a model: cache, rows, verifiers, controller, lookup drafts, and all together."""

import math

import pytest
import torch

from specdec_kernels.cache import RaggedKV
from specdec_kernels.config import SpeculativeConfig
from specdec_kernels.decoding.controller import AcceptanceModel, Controller, CostModel
from specdec_kernels.decoding.loop import Loop
from specdec_kernels.decoding.rows import Rows
from specdec_kernels.decoding.verify import KernelVerifier, WalkVerifier
from specdec_kernels.drafting.factory import make_drafter
from specdec_kernels.drafting.matches import chance
from specdec_kernels.drafting.ngram import PARTING_CHANCE, NgramDrafter, merge
from specdec_kernels.drafting.none import NoDrafter
from specdec_kernels.metrics import Metrics
from specdec_kernels.tree import DraftTree, SamplingParams

CPU = torch.device("cpu")


def rows_of(prompts, new=8, eos=(), **options):
    rows = Rows(prompts, new, frozenset(eos), CPU, **options)
    rows.sync()
    return rows


def test_rows_finish_by_length_eos_and_condition():
    told = []
    rows = rows_of(
        [[1, 2], [3], [4]],
        new=3,
        eos=[9],
        should_stop=lambda b, new: b == 2 and new[-1] == 7,
        on_token=lambda *event: told.append(event),
    )
    assert not rows.push(0, 5) and not rows.push(0, 6, drafted=True) and rows.push(0, 5)
    assert rows.push(1, 9)
    assert not rows.push(2, 8) and rows.push(2, 7)
    assert rows.done == [True] * 3 and [rows.left(b) for b in range(3)] == [0, 0, 0]
    assert told[:2] == [(0, 5, False), (0, 6, True)] and len(told) == 6
    rows.sync()
    assert rows.lens.tolist() == [5, 2, 3]
    assert [rows.tokens[b, :n].tolist() for b, n in enumerate([5, 2, 3])] == [
        [1, 2, 5, 6, 5],
        [3, 9],
        [4, 8, 7],
    ]


def test_row_buffers_grow_with_the_text():
    rows = Rows([[1], [2, 3]], 10**9, frozenset(), CPU)
    for token in range(5000):
        rows.push(0, token)
        if token % 7 == 0:
            rows.sync()
    rows.sync()
    assert rows.tokens[0, : rows.lens[0]].tolist() == [1, *range(5000)]
    assert rows.tokens[1, :2].tolist() == [2, 3] and rows.tokens.numel() < 50_000


def filled(kv, lens, layers=2, heads=2, dim=3, width=6):
    """A cache after prefill; K of slot s of row b is 100 b + s, padding NaN."""
    kv.reserve(width)
    for layer in range(layers):
        k = torch.full((len(lens), heads, width, dim), math.nan)
        for b, n in enumerate(lens):
            k[b, :, width - n :] = (100 * b + torch.arange(n, dtype=torch.float32))[:, None]
        kv.write_prefill(layer, k, -k, lens)
    kv.set_lens(lens)


def test_cache_prefill_window_commit():
    lens = [2, 6, 4]
    kv = RaggedKV(3, 64, CPU)
    filled(kv, lens)
    window = torch.arange(5, dtype=torch.float32)[None, None, :, None] + 10.0
    k = window + 100 * torch.arange(3)[:, None, None, None] + torch.zeros(3, 2, 5, 3)
    for layer in range(2):
        keys, values = kv.write_window(layer, k, -k)
        assert keys.shape[2] == values.shape[2] == 6 + 5
    path = torch.tensor([[0, 2, 4, -1, -1], [0, 1, -1, -1, -1], [-1] * 5], dtype=torch.int32)
    kv.commit(path, [3, 2, 0])
    assert kv.lens == kv.prefix_len.tolist() == [5, 8, 4]
    expected = [[0, 1, 10, 12, 14], [100, 101, 102, 103, 104, 105, 110, 111], [200, 201, 202, 203]]
    for layer in range(2):
        for b, slots in enumerate(expected):
            assert kv.keys[layer][b, 1, : len(slots), 2].tolist() == slots
            assert kv.values[layer][b, 0, : len(slots), 0].tolist() == [-s for s in slots]


def test_cache_growth_keeps_what_is_there():
    kv = RaggedKV(2, 10**9, CPU)
    filled(kv, [6, 3])
    first = kv.capacity
    before = [kv.keys[1][b, :, :n].clone() for b, n in enumerate([6, 3])]
    kv.reserve(first + 1)
    assert first < kv.capacity < 10_000
    assert all(torch.equal(kv.keys[1][b, :, : x.shape[1]], x) for b, x in enumerate(before))
    kv.reserve(5)
    assert kv.capacity > first


def one_hot(tokens, vocab=10):
    """Logits whose argmax is `tokens`, a nested list [B][T]."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float() * 5


def trees():
    """A chain, a tree with a wrong sibling, a finished row, a lone root."""
    return DraftTree.from_lists(
        [[1, 4, 5, 6], [1, 7, 4, 5], [], [2]],
        [[-1, 0, 1, 2], [-1, 0, 0, 2], [], [-1]],
    )


# What the target says at each slot: row 0 rejects the third draft, row 1 takes the second child.
TARGET = [[4, 5, 8, 9], [4, 9, 5, 3], [7, 7, 7, 7], [6, 0, 0, 0]]


def pick_largest(chosen, logits):
    assert len(chosen) == len(logits)
    return logits.argmax(-1).tolist()


def verifiers(logits):
    yield KernelVerifier(None)
    yield WalkVerifier(pick_largest)


def test_a19_verifiers_by_hand():
    """Ragged rows in one batch: what is emitted, which slots are kept, what is counted."""
    logits = one_hot(TARGET)
    for verifier in verifiers(logits):
        rows = rows_of([[1], [1], [1], [2]])
        rows.done[2] = True
        decision = verifier.verify(logits, trees(), rows)
        assert rows.new == [[4, 5, 8], [4, 5, 3], [], [6]]
        assert decision.num_kept == [3, 3, 0, 1]
        assert [max(n, 0) for n in decision.num_accepted] == [2, 2, 0, 0]
        assert decision.path[:, :3].tolist() == [[0, 1, 2], [0, 2, 3], [-1, -1, -1], [0, -1, -1]]


@pytest.mark.parametrize("eos, new", [(4, [4]), (5, [4, 5]), (8, [4, 5, 8])])
def test_verifiers_stop_inside_a_block(eos, new):
    logits = one_hot(TARGET)
    for verifier in verifiers(logits):
        rows = rows_of([[1], [1], [1], [2]], eos=[eos])
        rows.done[2] = True
        decision = verifier.verify(logits, trees(), rows)
        assert rows.new[0] == new and rows.done[0]
        assert decision.num_kept[0] == len(new)


def test_verifiers_stop_at_the_length():
    logits = one_hot(TARGET)
    for verifier in verifiers(logits):
        rows = rows_of([[1], [1], [1], [2]], new=2)
        rows.done[2] = True
        decision = verifier.verify(logits, trees(), rows)
        assert rows.new == [[4, 5], [4, 5], [], [6]] and decision.num_kept == [2, 2, 0, 1]


def test_d13_metrics_of_hand_made_rounds():
    metrics = Metrics()
    assert metrics.acceptance_rate == 0.0 and metrics.mean_acceptance_length == 1.0
    metrics.record_row(0, 0)  # no draft
    metrics.record_row(3, 0)  # the first one wrong, whatever came behind it
    metrics.record_row(5, 2)
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (2, 8, 2)
    assert metrics.accepted_per_position == [1, 1] and metrics.acceptance_rate == 0.25
    assert metrics.mean_acceptance_length == 1 + 2 / 3
    total = Metrics()
    total.add(metrics)
    total.add(metrics)
    assert total.accepted_per_position == [2, 2] and total.num_row_steps == 6
    assert total.snapshot()["acceptance_rate"] == 0.25
    total.reset()
    assert total == Metrics()


class Bigram:
    """A target whose next token depends on the last two: logits without a model or a cache."""

    def __init__(self, vocab=13, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.table = torch.randn(vocab, vocab, vocab, generator=g) * 3

    def plain(self, prompt, new, eos=()):
        text = list(prompt)
        while len(text) < len(prompt) + new and (len(text) == len(prompt) or text[-1] not in eos):
            text.append(int(self.table[text[-2], text[-1]].argmax()))
        return text[len(prompt) :]

    def forward(self, rows, cache):
        """The loop's forward, which also checks the tree and writes K as the token ids."""

        def run(tree):
            ids, parents = tree.draft_token_ids, tree.parents
            assert ids.min() >= 0 and ids.max() < len(self.table)
            logits = torch.full((*ids.shape, len(self.table)), math.nan)
            for b, nodes in enumerate(tree.num_nodes.tolist()):
                assert (nodes == 0) == rows.done[b]
                text = rows.tokens[b, : rows.lens[b]].tolist()
                for slot in range(nodes):
                    parent = int(parents[b, slot])
                    before = text[-2] if parent < 0 else int(ids[b, parent])
                    logits[b, slot] = self.table[before, ids[b, slot]]
            k = ids[:, None, :, None].float()
            cache.write_window(0, k, k)
            return logits, None

        return run


def run_loop(target, prompts, drafter, new=40, eos=(), fixed=6, verifier=None, limit=None):
    rows = rows_of(prompts, new, eos)
    verifier = verifier or KernelVerifier(None)
    cache = RaggedKV(len(prompts), 500, CPU)
    filled(cache, rows.prompt_lens, layers=1, heads=1, dim=1, width=max(rows.prompt_lens))
    for b, prompt in enumerate(prompts):
        cache.keys[0][b, 0, : len(prompt), 0] = torch.tensor(prompt, dtype=torch.float32)
    verifier.first(torch.stack([target.table[p[-2], p[-1]] for p in prompts]), rows)
    metrics = Metrics()
    controller = Controller(CostModel(), AcceptanceModel(), fixed=fixed, largest=16)
    loop = Loop(
        target.forward(rows, cache), cache, rows, drafter, verifier, controller, metrics, limit
    )
    loop.run()
    for b, prompt in enumerate(prompts):  # the cache holds the text, all but its last token
        text = [*prompt, *rows.new[b]][:-1]
        assert cache.lens[b] == len(text)
        assert cache.keys[0][b, 0, : len(text), 0].tolist() == text
    return rows.new, metrics


PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [6, 7, 8, 9, 6, 7, 8, 9, 6]]


@pytest.mark.parametrize("fixed", [1, 6, None])
@pytest.mark.parametrize("walk", [False, True])
def test_loop_equals_plain(fixed, walk):
    target = Bigram()
    expected = [target.plain(p, 40) for p in PROMPTS]
    eos = expected[1][11]
    for ends in ((), (eos,)):
        expected = [target.plain(p, 40, ends) for p in PROMPTS]
        drafter = make_drafter(SpeculativeConfig(), frozenset(ends))
        verifier = WalkVerifier(pick_largest) if walk else None
        new, metrics = run_loop(target, PROMPTS, drafter, 40, ends, fixed, verifier)
        assert new == expected
        assert metrics.num_accepted_tokens > 0 or ends
        assert metrics.num_new_tokens + len(PROMPTS) == sum(map(len, new))


def test_loop_without_drafts_and_at_the_position_limit():
    target = Bigram()
    expected = [target.plain(p, 30) for p in PROMPTS]
    new, metrics = run_loop(target, PROMPTS, NoDrafter(), 30)
    assert new == expected and metrics.num_drafts == 0 and metrics.num_steps == 29
    drafter = make_drafter(SpeculativeConfig(), frozenset())
    new, metrics = run_loop(target, PROMPTS, drafter, 30, limit=20)
    assert new == expected
    assert metrics.num_steps > 30 - (20 - 9)  # beyond position 20 one token at a time


def test_sampled_loop_does_not_depend_on_drafts():
    target = Bigram()
    sampling = SamplingParams.make(3, temperature=1.5, seed=[5, 6, 7])
    texts = []
    for drafter in (NoDrafter(), make_drafter(SpeculativeConfig(), frozenset())):
        new, metrics = run_loop(target, PROMPTS, drafter, verifier=KernelVerifier(sampling))
        texts.append(new)
    assert texts[0] == texts[1] and metrics.num_drafts > 0


def test_merge_makes_a_trie():
    tokens, parents, chances = merge(1, [[2, 3, 4], [2, 5], [6, 3]], 1, 20, 9)
    paths = {(): 1.0}
    for slot in range(1, len(tokens)):
        path, node = [], slot
        while node > 0:
            path.insert(0, tokens[node])
            node = parents[node]
        paths[tuple(path)] = chances[slot]
    first, second, third = (chance(n) for n in (1, 2, 3))
    assert paths == pytest.approx(
        {
            (): 1.0,
            (2,): first,
            (2, 3): first * second,
            (2, 3, 4): first * second * third,
            (2, 5): first * PARTING_CHANCE,
            (6,): PARTING_CHANCE,
            (6, 3): PARTING_CHANCE * second,
        }
    )
    assert tokens[0] == 1 and parents[0] == -1 and chances == sorted(chances, reverse=True)
    assert all(parent < slot for slot, parent in enumerate(parents))
    assert merge(1, [[2, 3, 4]], 4, 0, 9) == ([], [], [])
    assert merge(1, [[2, 3, 4]], 4, 1, 9) == ([1], [-1], [1.0])
    assert merge(1, [[2, 3, 4]], 4, 9, 0) == ([1], [-1], [1.0])
    assert merge(1, [[2, 3, 4]], 4, 9, 2)[0] == [1, 2, 3]


def test_a_long_match_takes_the_room_and_a_short_one_shares_it():
    drafts = [[2] * 50, [3] * 50, [4] * 50]
    assert merge(1, drafts, 8, 9, 40)[0] == [1] + [2] * 8
    tokens = merge(1, drafts, 1, 9, 40)[0]
    assert len(tokens) == 9 and {3, 4} < set(tokens)
    for room in range(13):
        assert len(merge(1, drafts, 2, room, 40)[0]) == room


def propose(drafter, rows, nodes, depth=10):
    width = max(map(len, rows))
    tokens = torch.tensor([r + [0] * (width - len(r)) for r in rows], dtype=torch.int32)
    lens = torch.tensor([len(r) for r in rows], dtype=torch.int32)
    classes = drafter.confidence(tokens, lens)
    return classes, drafter.propose(tokens, lens, None, nodes, [depth] * len(rows))


def lookup(**options):
    options = {"min_n": 1, "max_n": 4, "num_matches": 3, "max_draft": 6, **options}
    return NgramDrafter(**options)


def test_c03_no_draft_beyond_an_eos():
    text = [[5, 1, 9, 7, 8, 5, 1]]
    _, tree = propose(lookup(eos_token_ids=frozenset([9])), text, [7])
    assert tree.draft_token_ids.tolist() == [[1, 9]]
    _, tree = propose(lookup(num_matches=1), text, [7])
    assert tree.draft_token_ids[0, 1:4].tolist() == [9, 7, 8]


def test_c07_rows_get_their_own_drafts():
    """First only row 1 matches, in the next step only row 2."""
    none = [1, 2, 3, 4]
    drafter = lookup()
    for hit in (1, 2):
        rows = [none, none, none]
        rows[hit] = [7, 8, 7]
        classes, tree = propose(drafter, rows, [4] * 3)
        assert [c > 0 for c in classes] == [b == hit for b in range(3)]
        assert tree.num_nodes.tolist() == [4 if b == hit else 1 for b in range(3)]
        assert tree.draft_token_ids[hit].tolist() == [7, 8, 7, 8]
        assert tree.draft_token_ids[0].tolist() == [4] * 4


def test_confidence_grows_with_the_match():
    drafter = lookup(max_n=16)
    for length, expected in ((1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4), (12, 4)):
        text = [*range(20, 20 + length), 3, 4, 5, *range(20, 20 + length)]
        assert propose(drafter, [text], [4])[0] == [expected]
    assert propose(drafter, [[1, 2, 3]], [4])[0] == [0]


def test_finished_rows_and_rows_without_drafts():
    _, tree = propose(lookup(), [[7, 8, 7], [1, 2, 3]], [0, 5])
    assert tree.num_nodes.tolist() == [0, 1]
    _, tree = propose(NoDrafter(), [[7, 8, 7], [1, 2, 3]], [5, 0])
    assert tree.num_nodes.tolist() == [1, 0] and tree.draft_token_ids[0, 0] == 7


def controller(fixed=None, largest=16, slot_cost=0.01):
    costs, acceptance = CostModel(), AcceptanceModel()
    for window in (1, 2, 4, 8, 16, 17):
        costs.record(1, window, 1.0 + slot_cost * (window - 1))
    return Controller(costs, acceptance, fixed=fixed, largest=largest)


def test_controller_grows_when_drafts_hold_and_stops_when_they_fail():
    adaptive = controller(slot_cost=0.2)
    for _ in range(40):
        size = adaptive.draft_size(1, [2])
        adaptive.record([2], [size], [size])
    assert adaptive.draft_size(1, [2]) >= 8
    sizes = []
    for _ in range(200):
        sizes.append(adaptive.draft_size(1, [2]))
        adaptive.record([2], [sizes[-1]], [0])
    assert sum(size > 0 for size in sizes[-100:]) <= 12 and max(sizes[-100:]) <= 1
    assert any(sizes[-100:])  # it still looks now and then
    for _ in range(400):
        size = adaptive.draft_size(1, [2])
        adaptive.record([2], [size], [size])
    assert adaptive.draft_size(1, [2]) >= 8  # and notices


def test_controller_weighs_the_measured_cost():
    assert controller(slot_cost=0.001).draft_size(1, [4]) == 16
    assert controller(slot_cost=0.2).draft_size(1, [4]) < 8
    assert controller(slot_cost=2.0).draft_size(1, [4]) <= 1
    assert controller().draft_size(1, [0]) == 0
    assert controller(fixed=5).draft_size(1, [1]) == 5
    assert controller(fixed=5).draft_size(1, [0]) == 0


def test_cost_curves_never_fall():
    costs = CostModel()
    assert costs.curve(1, [1, 2, 9]) == sorted(costs.curve(1, [1, 2, 9]))
    for window, seconds in ((1, 1.0), (4, 0.9), (9, 2.0)):
        costs.record(1, window, seconds)
    curve = costs.curve(1, list(range(1, 40)))
    assert curve == sorted(curve) and costs.largest(1) >= 9
    assert costs.largest(2) == 1 and costs.curve(2, [1])[0] == 1.0


def test_a_disturbed_measurement_does_not_hide_the_cost_of_larger_windows():
    """While the machine was busy a step took a hundred times as long: large drafts seemed free."""
    adaptive = controller(slot_cost=0.2, largest=48)
    adaptive.costs.record(1, 3, 200.0)
    assert adaptive.costs.curve(1, [2, 3, 16]) == pytest.approx([1.2, 1.6, 4.0])
    adaptive.costs.record(1, 33, 7.0)
    assert adaptive.draft_size(1, [1]) <= 2


def test_acceptance_model_learns_and_forgets():
    model = AcceptanceModel()
    assert 0 < model.probability(1) < model.probability(4) < 1
    assert [model.probability(c) for c in (5, 8)] == [model.probability(c) for c in (1, 4)]
    for _ in range(60):
        model.record(1, 4, 4)
    high = model.probability(1)
    for _ in range(60):
        model.record(1, 4, 0)
    assert high > 0.9 and model.probability(1) < 0.15
    model.record(1, 0, 0)  # nothing drafted teaches nothing
    assert model.probability(1) < 0.15


def test_what_is_learnt_is_bounded_and_survives_its_state():
    costs = CostModel()
    for batch in range(1, 3000):
        costs.record(batch, 5, 0.001 * batch)
    state = costs.state()
    assert len(state) == 1024 and [row[0] for row in state[-2:]] == [2998, 2999]
    other = CostModel()
    other.restore(state)
    assert other.curve(2999, [1, 5, 9]) == costs.curve(2999, [1, 5, 9])
    chances = AcceptanceModel()
    for drafted, accepted in ((4, 4), (4, 1), (3, 0)):
        chances.record(2, drafted, accepted)
    copy = AcceptanceModel()
    copy.restore(chances.state())
    assert copy.probability(2) == chances.probability(2)
    for wrong in ([[1, 2, [0.0]]], [[1, 2, [float("nan")]]], [[1]], [["a", 2, [1.0]]]):
        with pytest.raises((TypeError, ValueError)):
            other.restore(wrong)
    assert other.state() == state
