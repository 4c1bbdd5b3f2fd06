"""The reference emits exactly the target's distribution: every outcome followed, in fp64."""

import itertools

import pytest
import torch

from specdec_kernels.testing import (
    Drafts,
    Filters,
    ToyModel,
    conditionals,
    exact_joint,
    exact_law,
    step_joint,
    step_law,
    total_variation,
)
from specdec_kernels.testing.exact import complete
from specdec_kernels.tree import SamplingParams

EXACT = 1e-12
CHAIN_RULES = ("token", "block", "recursive", "coupled")
TREE_RULES = ("recursive", "coupled")
TREE = (-1, 0, 0, 1, 2, 1)
FILTERS = {
    "none": Filters(),
    "temperature": Filters(temperature=0.6),
    "greedy": Filters(temperature=0.0, repetition_penalty=1.5),
    "top_k": Filters(temperature=1.4, top_k=2),
    "top_p": Filters(top_p=0.8),
    "min_p": Filters(temperature=0.9, min_p=0.2),
    "penalties": Filters(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    "bias": Filters(bias=(0.7, -0.7, -torch.inf, 0.2)),
    "all": Filters(1.3, 3, 0.95, 0.03, 1.2, 0.2, 0.1, (0.5, 0.0, -0.5, 0.3)),
}


def models(vocab, seed=0, outputs=None):
    target = ToyModel(vocab, seed, scale=1.2)
    if outputs is None:
        return target, target.draft_of(0.5, seed + 100)
    return target, ToyModel(vocab, seed + 100, outputs=outputs)


def distance(target, draft, drafts, filters, rule, vocab_map=None, prompt=(0, 1)):
    found = step_joint(target, draft, drafts, prompt, filters, rule, vocab_map)
    return total_variation(found, exact_joint(target, prompt, found.dim(), filters))


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_joint_on_sampled_chains(rule, filters):
    for length in (1, 2):
        drafts = Drafts.chain(length, filters=Filters(temperature=1.5))
        assert distance(*models(4), drafts, filters, rule) < EXACT


@pytest.mark.parametrize("rule, vocab", [("token", 4), ("block", 4), ("block", 5), ("coupled", 3)])
def test_joint_on_sampled_chains_of_three(rule, vocab):
    filters = Filters(temperature=1.2, presence_penalty=0.3)
    drafts = Drafts.chain(3, filters=Filters(temperature=1.2, frequency_penalty=0.5))
    assert distance(*models(vocab), drafts, filters, rule) < EXACT


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("rule", TREE_RULES)
def test_joint_on_trees_of_sampled_siblings(rule, filters):
    drafts = Drafts((-1, 0, 0, 1), filters=Filters(temperature=1.5))
    assert distance(*models(4), drafts, filters, rule) < EXACT


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("rule", ["token", "recursive", "coupled"])
def test_joint_on_deterministic_trees(rule, filters):
    assert distance(*models(4), Drafts(TREE, sampled=False), filters, rule) < EXACT


@pytest.mark.parametrize("vocab", [2, 6])
@pytest.mark.parametrize("sampled", [False, True])
def test_joint_of_block_in_other_vocabularies(vocab, sampled):
    drafts = Drafts.chain(2, sampled=sampled)
    assert distance(*models(vocab), drafts, FILTERS["penalties"], "block") < EXACT


DRAFT_VOCABULARIES = {
    "mapped": (3, torch.tensor([4, 0, 2])),
    "mapped in part": (4, torch.tensor([4, -1, 2, 7])),
    "padded": (7, None),
    "smaller": (3, None),
}


@pytest.mark.parametrize("outputs, vocab_map", DRAFT_VOCABULARIES.values(), ids=DRAFT_VOCABULARIES)
@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_joint_with_another_draft_vocabulary(rule, outputs, vocab_map):
    target, draft = models(5, outputs=outputs)
    filters = Filters(temperature=0.9, top_k=4, repetition_penalty=1.2)
    assert distance(target, draft, Drafts.chain(2), filters, rule, vocab_map) < EXACT
    if rule in TREE_RULES:
        assert distance(target, draft, Drafts((-1, 0, 0)), filters, rule, vocab_map) < EXACT


@pytest.mark.parametrize("rule", TREE_RULES)
def test_joint_when_siblings_outnumber_what_can_be_drafted(rule):
    drafts = Drafts((-1, 0, 0, 0, 1), filters=Filters(top_k=2))
    assert distance(*models(5), drafts, Filters(temperature=0.7), rule) < EXACT


def pick(g, values):
    return values[int(torch.randint(len(values), (), generator=g))]


def random_filters(g, vocab):
    return Filters(
        temperature=pick(g, [0.0, 0.5, 1.0, 1.7]),
        top_k=pick(g, [0, 2, 3]),
        top_p=pick(g, [1.0, 0.9, 0.6]),
        min_p=pick(g, [0.0, 0.1]),
        repetition_penalty=pick(g, [1.0, 1.4, 0.8]),
        presence_penalty=pick(g, [0.0, 0.5]),
        frequency_penalty=pick(g, [0.0, 0.3]),
        bias=pick(g, [(), tuple(torch.randn(vocab, generator=g).tolist())]),
    )


def random_parents(g, size, depth):
    """A topologically sorted tree no deeper than `depth`."""
    depths = [0]
    for slot in range(1, size):
        depths.append(pick(g, [d for d in depths[max(0, slot - 4) : slot] if d < depth] or [0]) + 1)
    parents = [-1]
    for slot in range(1, size):
        parents.append(pick(g, [s for s in range(slot) if depths[s] == depths[slot] - 1]))
    return tuple(parents)


@pytest.mark.parametrize("seed", range(30))
def test_joint_fuzz_trees_of_sampled_siblings(seed):
    g = torch.Generator().manual_seed(seed)
    vocab, size = pick(g, [3, 4, 5, 6]), pick(g, [3, 4, 5, 6, 7, 8])
    drafts = Drafts(
        random_parents(g, size, 3), filters=Filters(temperature=1.3, top_k=2 if size > 5 else 0)
    )
    filters = random_filters(g, vocab)
    for rule in TREE_RULES:
        assert distance(*models(vocab, seed), drafts, filters, rule) < EXACT, (drafts, filters)


@pytest.mark.parametrize("seed", range(40))
def test_joint_fuzz_trees_of_one_hot_siblings(seed):
    """Any tokens, equal siblings and ids outside the vocabulary among them."""
    g = torch.Generator().manual_seed(seed)
    vocab, size = pick(g, [2, 4, 6]), pick(g, [2, 4, 6, 8])
    target, filters, prompt = ToyModel(vocab, seed), random_filters(g, vocab), (1, 0)
    parents = random_parents(g, size, 3)
    ids = torch.cat([torch.zeros(1).long(), torch.randint(-1, vocab + 1, (size - 1,), generator=g)])
    before = torch.cat([torch.tensor([prompt[0]]), ids[torch.tensor(parents[1:])]])
    text, zeros = torch.tensor([prompt]), torch.zeros(1, dtype=torch.int64)
    sampling = filters.sampling(text, text[:, :0], vocab, seed=zeros, position=zeros, step=zeros)
    exact = conditionals(target, prompt, 4, filters)
    for rule in ("token", "recursive", "coupled"):
        law = exact_law(
            target.logits(before, ids).double(),
            ids,
            torch.tensor(parents, dtype=torch.int32),
            sampling,
            rule=rule,
        )
        assert sum(law.values()) == pytest.approx(1, abs=EXACT)
        joint = exact_joint(target, prompt, 4, filters)
        assert total_variation(complete(law, exact), joint) < EXACT, (parents, ids, filters)


def test_acceptance_of_one_draft():
    """sum min(p, q) under rule token, sum p q under coupled with independent noise."""
    target, draft = models(5)
    p, q = (torch.softmax(m.table[0, 1].double(), -1) for m in (target, draft))
    for rule, rate in (("token", torch.minimum(p, q).sum()), ("coupled", (p * q).sum())):
        law = step_law(target, draft, Drafts.chain(1), (0, 1), Filters(), rule)
        accepted = sum(chance for tokens, chance in law.items() if len(tokens) == 2)
        assert accepted == pytest.approx(float(rate), abs=EXACT)


def test_block_accepts_at_least_as_much_as_token():
    target, draft = models(4)
    for length in (2, 3):
        rates = []
        for rule in ("token", "block"):
            law = step_law(target, draft, Drafts.chain(length), (0, 1), Filters(), rule)
            rates.append(sum(chance * (len(tokens) - 1) for tokens, chance in law.items()))
        assert rates[1] > rates[0] + 1e-3


def law_of_siblings(order, draft_logits):
    """One step on two siblings of the draft's, drawn as `order` says, verified as `recursive`."""
    target, draft = models(4)
    logits = draft.table[0, 1].double()
    q = torch.softmax(logits, -1)
    total = torch.zeros(4, dtype=torch.float64)
    for a, b in itertools.permutations(range(4), 2):
        first, second = order(a, b, q)
        law = exact_law(
            target.table[0, 1].double().expand(3, -1),
            torch.tensor([1, first, second]),
            torch.tensor([-1, 0, 0], dtype=torch.int32),
            SamplingParams.make(1),
            rule="recursive",
            draft_logits=draft_logits(logits).expand(3, -1),
        )
        for tokens, chance in law.items():
            total[tokens[0]] += q[a] * q[b] / (1 - q[a]) * chance
    return total_variation(total, torch.softmax(target.table[0, 1].double(), -1))


def test_negative_controls_of_the_enumeration():
    """It sees siblings out of their order, and draft logits that were not drawn from."""

    def drawn(a, b, q):
        return a, b

    def best_first(a, b, q):
        return (a, b) if q[a] > q[b] else (b, a)

    assert law_of_siblings(drawn, lambda logits: logits) < EXACT
    assert law_of_siblings(best_first, lambda logits: logits) > 0.01
    assert law_of_siblings(drawn, lambda logits: logits * 0.7) > 0.01
