"""Processors that name allowed tokens: masks per node of a tree, asked for by level (D12)."""

import functools
import itertools
import math

import pytest
import torch
from tiny import (
    accelerated,
    batch,
    fresh,
    future_of,
    lookup_rows,
    new_tokens,
    use_drafter,
    wrong,
)
from transformers import LogitsProcessor

import specdec_kernels as sdk

VOCAB, NEW = 96, 32


@functools.cache
def model():
    return fresh("phi3")


@functools.cache
def rows():
    return lookup_rows(model())


class Cycle(LogitsProcessor):
    """Token t may be followed by those whose sum with t leaves no remainder of 5, or by EOS."""

    specdec_stateless = True

    def __init__(self):
        self.asked = []

    def allowed(self, input_ids):
        token = torch.arange(VOCAB)
        return ((token + input_ids[:, -1:]) % 5 != 0) & (token > 1)

    def __call__(self, input_ids, scores):
        return scores.masked_fill(~self.allowed(input_ids), -math.inf)

    def allowed_tokens(self, input_ids):
        self.asked.append(input_ids)
        return pack(self.allowed(input_ids))


def pack(allowed):
    """Bits in xgrammar's layout."""
    words = torch.zeros(len(allowed), -(-allowed.shape[1] // 32), dtype=torch.int64)
    for token in range(allowed.shape[1]):
        words[:, token // 32] |= allowed[:, token].long() << token % 32
    return words.to(torch.int32)


@functools.cache
def plain(size, **options):
    options = dict(max_new_tokens=NEW, logits_processor=[Cycle()], **options)
    return new_tokens(model(), batch(rows()[:size]), **options)


def holds(true):
    return [true[:6]]


def fails(true):
    return [[wrong(t) for t in true[:6]]]


def branches(true):
    """Two wrong siblings, one of them forbidden, before the right path, which then goes wrong."""
    return [[wrong(true[0]), 5], [0, 7], [*true[:3], *map(wrong, true[3:5])]] if true else []


@pytest.mark.parametrize("drafts", [holds, fails, branches], ids=lambda d: d.__name__)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("penalty", [None, 1.3])
def test_greedy_equals_plain(drafts, size, penalty, monkeypatch):
    expected, chosen = plain(size, repetition_penalty=penalty), rows()[:size]
    assert expected != new_tokens(model(), batch(chosen), max_new_tokens=NEW)
    future = future_of(chosen, expected)
    use_drafter(monkeypatch, lambda b, text: drafts(future(b, text)))
    monkeypatch.delattr("specdec_kernels.hf.generate.WalkVerifier")
    with accelerated(model(), num_speculative_tokens=9) as metrics:
        options = dict(logits_processor=[Cycle()], repetition_penalty=penalty)
        assert new_tokens(model(), batch(chosen), max_new_tokens=NEW, **options) == expected
    low, high = {holds: (1.0, 1.0), fails: (0.0, 0.0), branches: (0.3, 0.9)}[drafts]
    assert low <= metrics.acceptance_rate <= high and metrics.num_draft_tokens > 0


@pytest.mark.parametrize("other", [dict(no_repeat_ngram_size=3), dict(min_new_tokens=5)], ids=str)
def test_on_the_walk_it_is_called_as_any_other(other):
    options = dict(max_new_tokens=NEW, eos_token_id=95, **other)
    expected = new_tokens(model(), batch(rows()), logits_processor=[Cycle()], **options)
    own = Cycle()
    with accelerated(model(), num_speculative_tokens=6):
        assert new_tokens(model(), batch(rows()), logits_processor=[own], **options) == expected
    assert not own.asked


def test_one_call_for_the_nodes_of_a_level(monkeypatch):
    """True prefixes, padding included; nothing below a forbidden node is asked about."""
    chosen, expected = rows()[:2], plain(2)
    future = future_of(chosen, expected)
    use_drafter(monkeypatch, lambda b, text: branches(future(b, text)))
    own = Cycle()
    with accelerated(model(), num_speculative_tokens=9):
        out = new_tokens(model(), batch(chosen), logits_processor=[own], max_new_tokens=12)
    assert out == [text[:12] for text in expected]
    padded = batch(chosen)["input_ids"].tolist()
    texts = [p + t[:1] for p, t in zip(padded, expected, strict=True)]
    levels = [[], [], [], []]
    for text, true in zip(texts, (t[1:] for t in expected), strict=True):
        levels[0].append(tuple(text))
        for chain in ([wrong(true[0]), 5], true[:3]):
            for depth in range(1, len(chain) + 1):
                last = [text[-1], *chain[:depth]]
                if all((a + b) % 5 and b > 1 for a, b in itertools.pairwise(last)):
                    levels[depth].append((*text, *chain[:depth]))
    asked = [list(map(tuple, ids.tolist())) for ids in own.asked]
    assert asked[0] == list(map(tuple, padded))
    assert [set(a) for a in asked[1:4]] == [set(level) for level in levels[:3]]
    assert [len(a) for a in asked[1:4]] == [len(level) for level in levels[:3]]


class Wrong(Cycle):
    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def allowed_tokens(self, input_ids):
        return self.answer


@pytest.mark.parametrize(
    "answer, got",
    [
        (torch.zeros(1, 3), r"\(1, 3\) of torch.float32"),
        (torch.zeros(1, 2, dtype=torch.int32), r"\(1, 2\) of torch.int32"),
        (None, "NoneType"),
    ],
)
def test_bad_masks(answer, got):
    with (
        accelerated(model()),
        pytest.raises(
            ValueError, match=r"Wrong.allowed_tokens: expected int32 \(1, 3\), got " + got
        ),
    ):
        new_tokens(model(), batch(rows()[:1]), logits_processor=[Wrong(answer)])


def test_two_grammars_and_one_that_allows_nothing():
    """Their intersection; when it is empty the lowest id follows, as in plain greedy decoding."""

    class Nothing(Cycle):
        def allowed(self, input_ids):
            even = torch.arange(VOCAB) % 2 == 0
            return even & (torch.full((len(input_ids), 1), input_ids.shape[1] % 4 != 0))

    options = dict(max_new_tokens=12)
    grammars = [Cycle(), Nothing()]
    expected = new_tokens(model(), batch(rows()), logits_processor=grammars, **options)
    assert any(0 in row for row in expected)
    with accelerated(model(), num_speculative_tokens=6):
        out = new_tokens(model(), batch(rows()), logits_processor=[Cycle(), Nothing()], **options)
    assert out == expected


class Machine(LogitsProcessor):
    """A grammar that allows one path, known by the prefix, and ends in the middle of a block."""

    def __init__(self, start, path):
        self.start, self.path = start, path

    def __call__(self, input_ids, scores):
        allowed = self.path[min(input_ids.shape[1] - self.start, len(self.path) - 1)]
        blocked = torch.full_like(scores, -math.inf)
        blocked[:, allowed] = scores[:, allowed]
        return blocked


def test_one_allowed_path(monkeypatch):
    """By a processor of unknown state and by prefix_allowed_tokens_fn: on the walk, one row."""
    inputs = batch(rows()[:1])
    width = inputs["input_ids"].shape[1]
    path = [11, 12, 13, 11, 12, 14, 15, 16, 90]
    drafter = use_drafter(monkeypatch, lambda b, text: [(path + path)[len(text) - width :][:6]])
    by_function = dict(
        prefix_allowed_tokens_fn=lambda b, ids: [path[min(len(ids) - width, len(path) - 1)]]
    )
    for options in (dict(logits_processor=[Machine(width, path)]), by_function):
        expected = new_tokens(model(), inputs, eos_token_id=90, **options)
        assert expected == [path]
        with accelerated(model(), num_speculative_tokens=6) as metrics:
            assert new_tokens(model(), inputs, eos_token_id=90, **options) == expected
        assert metrics.num_steps == 2 and drafter.sizes


def test_masks_of_a_processor_with_state_are_not_asked_for():
    class Stateful(Cycle):
        specdec_stateless = False

    options = dict(max_new_tokens=NEW, logits_processor=[Stateful()])
    with accelerated(model(), num_speculative_tokens=6):
        assert new_tokens(model(), batch(rows()[:1]), **options) == plain(1)
    assert not options["logits_processor"][0].asked
    sdk.patch(model())
    with pytest.warns(UserWarning, match="keep state across rows: Stateful"):
        assert new_tokens(model(), batch(rows()), **options) == plain(3)
    sdk.unpatch(model())
