"""The suffix tree against a dictionary of all n-grams."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from suffix_reference import (
    END,
    AllNgrams,
    Path,
    allowed,
    chance,
    continuations,
    longest_match,
    scores,
)

from specdec_kernels import native

pytestmark = pytest.mark.skipif(native.cpu is None, reason=str(native.cpu_error))


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


pieces = st.one_of(
    st.lists(st.integers(0, 1), max_size=12),
    st.lists(st.integers(0, 3), max_size=12),
    st.lists(st.integers(0, 60), max_size=30),
    st.builds(lambda unit, n: unit * n, st.lists(st.integers(0, 2), max_size=4), st.integers(1, 9)),
    st.integers(1, 40),  # copies that many tokens of what came before
)


class Pair:
    """A tree and its specification, which take the same calls."""

    def __init__(self, max_depth, eager):
        self.tree = native.cpu.SuffixTree(max_depth, eager)
        self.spec = AllNgrams(max_depth, eager)
        self.said = [0]
        self.opened, self.live = [], []

    def extend(self, text, piece):
        new = self.said[-piece:] if isinstance(piece, int) else piece
        self.said += new
        self.tree.extend(text, ints(new))
        self.spec.extend(text, new)

    def open(self):
        text = self.tree.open()
        assert text == self.spec.open()
        self.live.append(text)
        self.opened.append(text)

    def close(self, text):
        self.tree.close(text)
        self.spec.close(text)
        self.live.remove(text)

    def remove_oldest(self):
        self.tree.remove_oldest()
        self.spec.remove_oldest()
        oldest = self.opened.pop(0)
        self.live = [text for text in self.live if text != oldest]

    def check(self):
        counts, depth = self.spec.counts(), self.spec.max_depth
        for ngram, count in counts.items():
            if ngram[-1] >= 0:
                assert self.tree.count(ngram) == count
        for ngram in {k[:-1] for k in counts if len(k) > 1}:
            found = self.tree.continuations(ngram)
            assert dict(found) == continuations(counts, ngram)
            assert [c for _, c in found] == sorted((c for _, c in found), reverse=True)
        assert self.tree.count([61]) == self.tree.count([0] * (depth + 1)) == 0
        kept = self.spec.texts[self.spec.first :]
        assert self.tree.num_texts == len(kept)
        assert self.tree.num_tokens == sum(token >= 0 for text in kept for token in text)
        return counts


@given(data=st.data(), max_depth=st.integers(2, 9))
def test_fuzz_counts_of_several_texts(data, max_depth):
    """Counts, order of children and the longest match, while texts come, grow, close and go."""
    pair = Pair(max_depth, eager=False)
    for _ in range(data.draw(st.integers(1, 10))):
        action = data.draw(st.sampled_from(["open", "extend", "extend", "close", "remove"]))
        if action == "open" or (action != "remove" and not pair.live):
            pair.open()
        if action == "close" and pair.live:
            pair.close(data.draw(st.sampled_from(pair.live)))
        elif action == "remove" and pair.opened:
            pair.remove_oldest()
        elif pair.live:
            pair.extend(data.draw(st.sampled_from(pair.live)), data.draw(pieces))
    counts = pair.check()
    context = pair.said[-12:]
    found = pair.tree.longest_match(context)
    assert found == 0 or set(continuations(counts, context[-found:])) - {END}
    assert found <= longest_match(counts, context, max_depth)
    for text in list(pair.live):
        pair.close(text)
    counts = pair.check()
    assert pair.tree.longest_match(context) == longest_match(counts, context, max_depth)
    while pair.opened:
        pair.remove_oldest()
        pair.check()


@given(parts=st.lists(pieces, min_size=1, max_size=6), max_depth=st.integers(2, 9))
def test_fuzz_counts_of_one_eager_text(parts, max_depth):
    """After every append: what was said before is found at once, the text's own end is not."""
    pair = Pair(max_depth, eager=True)
    pair.open()
    for part in parts:
        pair.extend(0, part)
        counts = pair.check()
        text = pair.spec.texts[0]
        known = longest_match(counts, text, max_depth)
        assert pair.tree.longest_match(text) == known
        earlier = [
            n
            for n in range(1, min(len(text), max_depth))
            if any(text[e - n : e] == text[-n:] for e in range(n, len(text)))
        ]
        assert known == max(earlier, default=0)
    pair.close(0)
    pair.check()


@given(
    parts=st.lists(pieces, min_size=1, max_size=5),
    max_depth=st.integers(2, 9),
    max_tokens=st.integers(0, 8),
    factor=st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    offset=st.sampled_from([-1.0, 0.0, 2.0]),
    min_prob=st.sampled_from([0.0, 0.1, 0.3, 1.0]),
    stop=st.lists(st.integers(0, 3), max_size=1),
    chances=st.sampled_from([(), (0.2, 0.5, 0.9), (1.0,)]),
    min_prob_beyond=st.sampled_from([0.0, 0.15, 2.0]),
    eager=st.booleans(),
)
def test_fuzz_drafts(parts, max_depth, stop, eager, **options):
    pair = Pair(max_depth, eager)
    pair.open()
    for part in parts:
        pair.extend(0, part)
    counts, context = pair.check(), pair.said[-12:]
    for tree in (True, False):
        draft = pair.tree.draft(ints(context), tree=tree, stop_tokens=stop, **options)
        check_draft(draft, pair.spec, counts, context, tree, stop, **options)
        again = pair.tree.draft(ints(context), tree=tree, stop_tokens=stop, **options)
        assert again == draft
        if tree and eager:
            by_length = scores(pair.spec, counts, context, stop=stop, **options)
            assert draft[3] == pytest.approx(max(by_length.values(), default=0.0))
            assert draft[3] == pytest.approx(by_length.get(draft[4], 0.0))


def check_draft(
    draft, spec, counts, context, tree, stop, *, max_tokens, min_prob, chances, **limits
):
    """Every node continues its path as often as it says; nothing is beyond a bound."""
    tokens, parents, probs, score, length = draft
    assert len(tokens) <= max_tokens
    least = limits["min_prob_beyond"] - 1e-12
    assert all(prob >= least for prob in probs[allowed(length, **limits) :])
    assert score == pytest.approx(sum(probs))
    paths, shares = [], []
    for i, (token, parent, prob) in enumerate(zip(tokens, parents, probs, strict=True)):
        assert parent < i and (tree or parent == i - 1)
        before = Path(tuple(context[-length:])) if parent < 0 else paths[parent]
        before, following = before.following(spec, counts)
        share = following[token] / sum(following.values())
        right = chance(chances, length + len(before.drafted))
        assert prob == pytest.approx(share * right * (1.0 if parent < 0 else probs[parent]))
        shares.append(share * (1.0 if parent < 0 else shares[parent]))
        assert shares[-1] >= min_prob - 1e-12
        assert parent < 0 or tokens[parent] not in stop
        if not tree:
            assert following[token] == max(c for t, c in following.items() if t >= 0)
        paths.append(before.then(token))
    assert len({path.drafted for path in paths}) == len(paths)
    assert probs == sorted(probs, reverse=True)


@pytest.mark.parametrize("max_depth", [3, 63, 64, 65, 130])
def test_many_continuations_and_deep_trees(max_depth):
    """Nodes with hundreds of children, which come and go, and n-grams that cross several blocks."""
    rng = random.Random(max_depth)
    pair = Pair(max_depth, eager=False)
    for _ in range(4):
        pair.open()
        for i in range(60):
            pair.extend(pair.live[-1], [0, 1 + rng.randrange(300)] if i % 7 else [0, 0, 5])
    for text in pair.live[:2]:
        pair.close(text)
    for _ in range(4):
        check_sample(pair, rng)
        pair.remove_oldest()
    assert pair.check() == {}


def check_sample(pair, rng):
    """Some of the n-grams, as there are many; all children of the root's most frequent one."""
    counts = pair.spec.counts()
    for ngram in [(0,), *rng.sample(sorted(counts), min(len(counts), 150))]:
        if ngram[-1] == END:
            continue
        assert pair.tree.count(ngram) == counts[ngram]
        if len(ngram) < pair.spec.max_depth:
            assert dict(pair.tree.continuations(ngram)) == continuations(counts, ngram)


def test_a_suffix_that_did_not_enter_yet_is_passed_over():
    """The longest match has shorter ones that begin among the text's last tokens."""
    text = [0, 0, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0]
    tree = native.cpu.SuffixTree(9)
    tree.extend(tree.open(), ints(text))
    counts = [tree.count(text[-n:]) for n in range(1, 7)]
    assert 0 in counts and counts[-1] == 1
    options = dict(max_tokens=2, factor=0.5, stop_tokens=[0])
    for tokens, _, _, _, length in (
        tree.draft(ints(text), tree=kind, **options) for kind in (False, True)
    ):
        assert len(tokens) <= length // 2


def test_what_was_said_last_comes_first_among_equals():
    pair = Pair(4, eager=True)
    pair.open()
    pair.extend(0, [1, 5, 1, 6, 1, 7, 1, 6, 1, 5, 1, 8, 1])
    assert pair.tree.continuations([1]) == [(5, 2), (6, 2), (8, 1), (7, 1)]
    pair.extend(0, [6, 1, 5])  # a repetition so far: counted once it parts from the earlier one
    assert pair.tree.continuations([1])[0] == (6, 3)


def test_an_eager_tree_holds_one_text():
    tree = native.cpu.SuffixTree(4, True)
    tree.extend(tree.open(), ints([1, 2]))
    with pytest.raises(RuntimeError, match="an eager tree holds a single text"):
        tree.open()


def test_a_draft_goes_on_where_the_tree_is_cut():
    text = list(range(100))
    tree = native.cpu.SuffixTree(8)
    number = tree.open()
    tree.extend(number, ints(text))
    tree.close(number)
    draft = tree.draft(ints([3, 4, 5]), max_tokens=50, factor=100.0)
    assert draft == (text[6:56], list(range(-1, 49)), [1.0] * 50, 50.0, 3)
    assert tree.draft(ints([93, 94, 95]), max_tokens=50, factor=100.0)[0] == text[96:]
