"""The draft-model drafter without transformers: toy models that see only what is in their cache."""

import math
from itertools import product

import pytest
import torch

from specdec_kernels.cache import RaggedKV
from specdec_kernels.config import SpeculativeConfig
from specdec_kernels.decoding.controller import AcceptanceModel, Controller, CostModel
from specdec_kernels.decoding.loop import Loop
from specdec_kernels.decoding.rows import Rows
from specdec_kernels.decoding.verify import KernelVerifier
from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.drafting.draft_model import DraftModelDrafter
from specdec_kernels.drafting.factory import Sources, make_drafter
from specdec_kernels.drafting.none import NoDrafter
from specdec_kernels.drafting.window import BestFirst, chains
from specdec_kernels.metrics import Metrics
from specdec_kernels.ops.sample import sample
from specdec_kernels.tree import Decision, SamplingParams

CPU = torch.device("cpu")
V = 12
PROMPTS = [[3], [1, 2, 3, 4, 5], [7, 7, 2]]


def randn(seed):
    return torch.randn(V, generator=torch.Generator().manual_seed(seed))


def logits_of(text):
    """Logits that depend on every token of a text and on where it stands."""
    state = 17
    for token in text:
        state = (state * 31 + int(token) + 7) % 4093
    return 2 * randn(state)


def buffers(texts):
    """What rows of these texts look like to a drafter: int32 tokens [B, S] and lens [B]."""
    tokens = torch.zeros(len(texts), 40, dtype=torch.int32)
    for b, text in enumerate(texts):
        tokens[b, : len(text)] = torch.tensor(text)
    return tokens, torch.tensor([len(text) for text in texts], dtype=torch.int32)


class Toy:
    """A model whose keys are the tokens it read; padding is NaN, which no text may contain.

    shift: added to the target's logits.
    """

    size = V

    def __init__(self, batch, shift=0, max_positions=None):
        self.shift, self.max_positions, self.translation = shift, max_positions, None
        self.kv = RaggedKV(batch, 10**6, CPU)
        self.cost = DraftCost(0.5)
        self.windows, self.prefills = [], []

    def prefill(self, tokens, lens):
        self.prefills.append(lens)
        width = max(*lens, 1)
        self.kv.reserve(width)
        keys = torch.full((len(lens), 1, width, 1), math.nan)
        for b, n in enumerate(lens):
            keys[b, 0, width - n :, 0] = tokens[b, :n]
        self.kv.write_prefill(0, keys, keys, lens)
        self.kv.set_lens(lens)

    def forward(self, tree):
        ids, nodes = tree.draft_token_ids, tree.num_nodes.tolist()
        live = torch.arange(tree.width) < tree.num_nodes[:, None]
        keys = ids.float().masked_fill(~live, math.nan)[:, None, :, None]
        keys, _ = self.kv.write_window(0, keys, keys)
        self.windows.append(nodes)
        out = torch.full((len(nodes), tree.width, self.size), math.nan)
        parents = tree.parents.tolist()
        for b, count in enumerate(nodes):
            prefix = keys[b, 0, : self.kv.lens[b], 0].tolist()
            for slot in range(count):
                text = prefix + self._path(ids[b], parents[b], slot)
                assert self.max_positions is None or len(text) <= self.max_positions
                out[b, slot] = self.logits(text)
        return out

    def logits(self, text):
        return logits_of(text) + self.shift

    def verify(self, tree):
        return self.forward(tree), None

    def _path(self, ids, parents, slot):
        path = []
        while slot >= 0:
            path.insert(0, int(ids[slot]))
            slot = parents[slot]
        return path


def plain(prompt, new, eos=()):
    text = list(prompt)
    while len(text) < len(prompt) + new:
        text.append(int(logits_of(text).argmax()))
        if text[-1] in eos:
            break
    return text[len(prompt) :]


def run(drafter, prompts=PROMPTS, new=40, size=4, eos=(), smallest=1, sampling=None, rule="auto"):
    target = Toy(len(prompts))
    rows = Rows(prompts, new, frozenset(eos), CPU)
    target.prefill(rows.tokens, rows.prompt_lens)
    verifier = KernelVerifier(sampling, rule=rule)
    verifier.first(torch.stack([logits_of(p) for p in prompts]), rows)
    metrics = Metrics()
    controller = Controller(
        CostModel(), AcceptanceModel(), fixed=size, largest=48, smallest=smallest
    )
    loop = Loop(target.verify, target.kv, rows, drafter, verifier, controller, metrics)
    loop.run()
    return rows.new, metrics


@pytest.mark.parametrize("topk", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_b05_a_model_that_drafts_for_itself_is_always_right(topk, size):
    """So its cache is level in every round; a step costs `depth` forwards, and one prefill ever."""
    model = Toy(3)
    texts, metrics = run(DraftModelDrafter(model, topk=topk), size=size)
    assert texts == [plain(p, 40) for p in PROMPTS]
    assert model.prefills == [[1, 5, 3]]
    if topk == 1:
        assert metrics.acceptance_rate == 1
        assert len(model.windows) == metrics.num_draft_tokens // 3
        firsts = model.windows[::size] if size > 1 else model.windows
        assert firsts[0] == [1] * 3 and all(w == [2] * 3 for w in firsts[1:-1])
    else:
        assert all(max(w) <= size + 1 for w in model.windows)
        assert metrics.mean_acceptance_length > min(size, 2) * 0.7 + 1


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("seed", [1, 2])
def test_other_models_draft_too(topk, seed):
    model = Toy(3, randn(seed))
    texts, metrics = run(DraftModelDrafter(model, topk=topk), size=5)
    assert texts == [plain(p, 40) for p in PROMPTS]
    assert 0.05 < metrics.acceptance_rate < 0.95


@pytest.mark.parametrize("topk", [1, 3])
def test_b05_wrong_drafts_do_not_outlast_their_round(topk):
    """Every third round the drafts are spoilt behind the drafter's back."""
    rounds = []

    class Spoilt(DraftModelDrafter):
        def propose(self, *args):
            tree = super().propose(*args)
            rounds.append([tree.drafted_depth(), None])
            if len(rounds) % 3 == 0:
                tree.draft_token_ids[:, 1:] = (tree.draft_token_ids[:, 1:] + 5) % V
            return tree

        def commit(self, decision, features):
            super().commit(decision, features)
            rounds[-1][1] = decision.num_accepted
            behind = [n - have for n, have in zip(lengths(), model.kv.lens, strict=True)]
            assert all(1 <= n <= 2 for n, done in zip(behind, rows.done, strict=True) if not done)

    model = Toy(3)
    target = Toy(3)
    rows = Rows(PROMPTS, 60, frozenset(), CPU)
    lengths = lambda: [rows.length(b) for b in range(3)]  # noqa: E731
    target.prefill(rows.tokens, rows.prompt_lens)
    verifier = KernelVerifier(None)
    verifier.first(torch.stack([logits_of(p) for p in PROMPTS]), rows)
    controller = Controller(CostModel(), AcceptanceModel(), fixed=4, largest=48)
    drafter = Spoilt(model, topk=topk)
    Loop(target.verify, target.kv, rows, drafter, verifier, controller, Metrics()).run()
    assert rows.new == [plain(p, 60) for p in PROMPTS]
    for i, (drafted, accepted) in enumerate(rounds, 1):
        if i % 3 and topk == 1:
            assert [a for a in accepted if a >= 0] == [
                d for d, a in zip(drafted, accepted, strict=True) if a >= 0
            ]
        elif i % 3:
            assert all(a >= min(d, 1) for d, a in zip(drafted, accepted, strict=True) if a >= 0)


def test_rows_that_pause_are_read_in_short_windows(monkeypatch):
    """Steps without drafts cost nothing; what was missed is read before the next draft."""
    monkeypatch.setattr("specdec_kernels.drafting.draft_model.LONGEST_WINDOW", 3)
    model = Toy(2)
    drafter = DraftModelDrafter(model)
    texts = [[3], [1, 2, 3, 4, 5]]

    def propose(nodes):
        return drafter.propose(*buffers(texts), None, nodes, [20, 20])

    def extend(counts):
        for text, n in zip(texts, counts, strict=True):
            for _ in range(n):
                text.append(int(logits_of(text).argmax()))
        path = torch.arange(4, dtype=torch.int32).repeat(2, 1)
        drafter.commit(Decision(path, [0, 0], list(counts)), None)

    for text in texts:
        text.append(int(logits_of(text).argmax()))
    drafter.begin(*buffers(texts), None)
    assert propose([1, 1]).width == 1 and not model.prefills and not model.windows
    extend([1, 1])
    tree = propose([3, 3])
    assert model.prefills == [[2, 6]] and model.windows == [[1, 1], [1, 1]]
    extend([3, 1])
    for _ in range(8):
        propose([1, 1])
        extend([1, 1])
    del model.windows[:]
    tree = propose([4, 4])
    assert model.windows == [[3, 3], [3, 3], [4, 3], [1, 1], [1, 1]]
    for b, text in enumerate(texts):
        assert tree.draft_token_ids[b, 1:].tolist() == plain(text, 3)


def test_c07_rows_without_a_draft_are_left_alone():
    """Finished ones, and those with no room; the others' drafts do not change."""
    model = Toy(3)
    drafter = DraftModelDrafter(model)
    texts = [[*p, *plain(p, 1)] for p in PROMPTS]
    tokens, lens = buffers(texts)
    drafter.begin(tokens, lens, None)
    tree = drafter.propose(tokens, lens, None, [0, 4, 4], [9, 2, 0])
    assert tree.num_nodes.tolist() == [0, 3, 1] and tree.width == 3
    assert tree.draft_token_ids[1, 1:].tolist() == plain(texts[1], 2)
    assert tree.draft_token_ids[2].tolist() == [texts[2][-1]] * 3
    assert tree.parents.tolist()[1:] == [[-1, 0, 1], [-1, -2, -2]]
    assert model.prefills == [[0, 5, 0]] and all(w[0] == w[2] == 0 for w in model.windows)


def test_b18_the_end_of_the_draft_models_positions():
    """It stops drafting there; rows that are beyond it from the start have no part at all."""
    model = Toy(2, max_positions=20)
    prompts = [[3], list(range(10)) * 2]
    texts, metrics = run(DraftModelDrafter(model), prompts, new=40, size=4)
    assert texts == [plain(p, 40) for p in prompts]
    assert metrics.acceptance_rate == 1 and 10 < metrics.num_draft_tokens < 20
    assert model.prefills == [[1, 0]] and all(w[1] == 0 for w in model.windows)
    texts, metrics = run(DraftModelDrafter(Toy(2, max_positions=3)), prompts, new=9)
    assert texts == [plain(p, 9) for p in prompts] and metrics.num_draft_tokens <= 2


@pytest.mark.parametrize("topk", [1, 3])
def test_d01_drafts_end_at_the_end_of_the_text(topk):
    for pos in range(1, 9):
        eos = plain(PROMPTS[1], 12)[pos]
        drafter = DraftModelDrafter(Toy(3), topk=topk, eos_token_ids=frozenset([eos]))
        trees, propose = [], drafter.propose
        drafter.propose = lambda *a, propose=propose, trees=trees: (
            trees.append(propose(*a)) or (trees[-1])
        )
        texts, _ = run(drafter, eos=[eos], size=6)
        assert texts == [plain(p, 40, [eos]) for p in PROMPTS]
        for tree in trees:
            parents, ids = tree.parents, tree.draft_token_ids
            above = ids.gather(1, parents.clamp(min=0).long())
            assert not ((above == eos) & (parents > 0)).any()


def enumerate_best(text, topk, nodes, depth):
    """The nodes of the best tree by going through all that could be in it."""
    found, level = [], [((), 0.0)]
    for _ in range(depth):
        below = []
        for path, score in level:
            logprobs = logits_of([*text, *path]).log_softmax(-1)
            for value, token in zip(*(x.tolist() for x in logprobs.topk(topk)), strict=True):
                below.append(((*path, token), score + value))
        found += below
        level = below
    return {path for path, _ in sorted(found, key=lambda item: -item[1])[:nodes]}


@pytest.mark.parametrize("topk, nodes, depth", [(2, 6, 4), (3, 9, 3), (4, 5, 1), (2, 40, 3)])
def test_b10_trees_are_the_most_likely_ones(topk, nodes, depth):
    """Every node is scored by the logits of its own path."""
    model = Toy(2)
    drafter = DraftModelDrafter(model, topk=topk)
    texts = [[*p, *plain(p, 1)] for p in PROMPTS[:2]]
    tokens, lens = buffers(texts)
    drafter.begin(tokens, lens, None)
    tree = drafter.propose(tokens, lens, None, [nodes + 1, nodes], [depth, depth])
    assert tree.draft_logits is None
    for b, text in enumerate(texts):
        paths = {
            tuple(model._path(tree.draft_token_ids[b], tree.parents[b].tolist(), slot))[1:]
            for slot in range(1, int(tree.num_nodes[b]))
        }
        assert paths == enumerate_best(text, topk, nodes - b, depth)
    assert len(model.windows) <= depth


def test_p_min_and_min_tokens():
    """A draft ends before an unlikely token; one that is too short is not used."""
    model = Toy(1)
    text = [*PROMPTS[1], *plain(PROMPTS[1], 1)]
    tokens, lens = buffers([text])
    best = [float(logits_of([*text, *plain(text, i)]).softmax(-1).max()) for i in range(6)]
    for topk, p in product((1, 2), (0.0, *(b + d for b in best for d in (-1e-4, 1e-4)))):
        length = next((i for i, b in enumerate(best) if b < p), 6)
        for least in (0, 1, 3, 6):
            drafter = DraftModelDrafter(Toy(1), topk=topk, p_min=p, min_tokens=least)
            drafter.begin(tokens, lens, None)
            tree = drafter.propose(tokens, lens, None, [7 if topk == 1 else 60], [6])
            drafted = tree.drafted_depth()[0]
            if topk == 1:
                assert drafted == (length if length >= least else 0)
            assert drafted == 0 or drafted >= least
    assert not model.windows


def test_config_options_reach_the_drafter():
    options = dict(
        draft_sample_method="probabilistic",
        rule="token",
        draft_min_tokens=2,
        num_speculative_tokens=5,
    )
    config = SpeculativeConfig.make(model="x", **options)
    assert config.method == "draft_model"
    drafter = make_drafter(config, frozenset([4]), Sources(model=Toy(1)))
    assert drafter.probabilistic and drafter.rule == "token" and drafter.min_tokens == 2
    config = SpeculativeConfig.make(model="x", draft_tree_topk=3, draft_p_min=0.25)
    drafter = make_drafter(config, frozenset(), Sources(model=Toy(1)))
    assert drafter.topk == 3 and drafter.least == math.log(0.25) and not drafter.probabilistic


def settings(**options):
    return SamplingParams.make(3, seed=[5, 6, 7], **options)


@pytest.mark.parametrize("rule", ["auto", "token", "recursive", "block"])
def test_a01_drawn_drafts_come_with_what_they_were_drawn_from(rule):
    """The draft stream at the node's position, or by step under `block`."""
    shift = randn(1)
    model = Toy(3, shift)
    texts = [[*p, *plain(p, 1)] for p in PROMPTS]
    tokens, lens = buffers(texts)
    sampling = settings(temperature=0.7, top_k=2, position=lens.long(), step=9)
    drafter = DraftModelDrafter(model, rule=rule, probabilistic=True)
    drafter.begin(tokens, lens, None)
    tree = drafter.propose(tokens, lens, sampling, [4] * 3, [3] * 3)
    for depth in range(3):
        law = tree.draft_logits[:, depth]
        position = lens.long() + depth if rule != "block" else torch.full((3,), 9 + (depth << 32))
        counters = SamplingParams.make(3, seed=[5, 6, 7], position=position)
        assert torch.equal(
            sample(law, counters, stream="draft"), tree.draft_token_ids[:, depth + 1]
        )
        for b, text in enumerate(texts):
            path = tree.draft_token_ids[b, 1 : depth + 1].tolist()
            assert torch.equal(law[b], (logits_of([*text, *path]) + shift) / 0.7)


def test_seeded_text_is_that_of_undrafted_sampling_and_shared_noise_agrees_most():
    """A29: under `coupled`; a draft model equal to the target is then right every time."""
    rates = {}
    expected, _ = run(NoDrafter(), sampling=settings(temperature=0.9, top_p=0.9), rule="coupled")
    for name, shift, probabilistic in (
        ("same, shared", 0, True),
        ("same, greedy", 0, False),
        ("other, shared", randn(1), True),
        ("other, greedy", randn(1), False),
    ):
        drafter = DraftModelDrafter(Toy(3, shift), rule="coupled", probabilistic=probabilistic)
        sampling = settings(temperature=0.9, top_p=0.9)
        texts, metrics = run(drafter, sampling=sampling, rule="coupled")
        assert texts == expected
        rates[name] = metrics.acceptance_rate
    assert rates["same, shared"] == 1 > rates["same, greedy"]
    assert rates["other, shared"] > rates["other, greedy"] > 0


def test_greedy_text_takes_greedy_drafts():
    """Also with temperature 0 among the parameters, which penalties bring."""
    for sampling in (None, settings(temperature=0.0)):
        drafter = DraftModelDrafter(Toy(3), rule="token", probabilistic=True)
        texts, metrics = run(drafter, sampling=sampling, rule="coupled")
        assert texts == [plain(p, 40) for p in PROMPTS] and metrics.acceptance_rate == 1


def test_b22_nan_logits_of_the_draft_model():
    """Bad guesses, but tokens of the vocabulary, and nothing fails."""

    class Broken(Toy):
        def forward(self, tree):
            return super().forward(tree) * math.nan

    for options in ({}, dict(topk=2), dict(p_min=0.1), dict(probabilistic=True, rule="token")):
        texts, _ = run(DraftModelDrafter(Broken(3), **options), new=8)
        assert texts == [plain(p, 8) for p in PROMPTS]
        texts, _ = run(
            DraftModelDrafter(Broken(3), **options),
            new=8,
            sampling=settings(),
            rule=options.get("rule", "auto"),
        )
        assert all(0 <= t < V for text in texts for t in text)


def test_chains_of_unequal_length():
    tree = chains(torch.tensor([[5, 6, 7], [8, 9, 9], [1, 1, 1]]), [3, 1, 0])
    assert tree.draft_token_ids.tolist() == [[5, 6, 7], [8, 8, 8], [1, 1, 1]]
    assert tree.parents.tolist() == [[-1, 0, 1], [-1, -2, -2], [-2, -2, -2]]
    assert tree.num_nodes.tolist() == [3, 1, 0] and tree.drafted_depth() == [2, 0, 0]


def test_widths_of_shallow_trees():
    """No wider than all the tokens that can hang there."""
    growth = BestFirst(
        Toy(1), 2, [100], [2], min_depth=1, least=-math.inf, eos_token_ids=frozenset()
    )
    assert growth.width == 1 + 2 + 4


def test_the_depth_of_trees():
    """A chain has no other bound than its size."""
    for topk, deepest in ((3, 2), (1, 7)):
        drafter = DraftModelDrafter(Toy(3), topk=topk, depth=2)
        texts, metrics = run(drafter, size=7)
        assert texts == [plain(p, 40) for p in PROMPTS]
        assert len(metrics.accepted_per_position) == deepest


@pytest.mark.parametrize("topk", [1, 3])
def test_trees_tell_their_chances(topk):
    """The product of the model's probabilities along a path, where someone asks for it."""

    def tree_of(tells_chances, sampling=None, **options):
        drafter = DraftModelDrafter(Toy(3), topk=topk, tells_chances=tells_chances, **options)
        tokens, lens = buffers(PROMPTS)
        drafter.begin(tokens, lens, None)
        return drafter.propose(tokens, lens, sampling, [7, 4, 0], [3, 1, 3])

    tree = tree_of(True)
    for b, nodes in enumerate(tree.num_nodes.tolist()):
        texts, chances = [PROMPTS[b]], [1.0]
        for slot in range(1, nodes):
            token, parent = int(tree.draft_token_ids[b, slot]), int(tree.parents[b, slot])
            law = logits_of(texts[parent]).softmax(0)
            texts.append([*texts[parent], token])
            chances.append(chances[parent] * float(law[token]))
        assert tree.chances[b, :nodes].tolist() == pytest.approx(chances[:nodes], rel=1e-5)
    assert sum(tree.num_nodes.tolist()) > 5
    assert tree_of(False).chances is None
    if topk == 1:
        drawn = tree_of(True, settings(), probabilistic=True, rule="token")
        assert drawn.chances is None and drawn.draft_logits is not None
