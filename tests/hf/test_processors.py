"""Logits processors under drafts that hold, fail or go wrong at one token: the text of plain."""

import functools

import pytest
import torch
import transformers
from tiny import (
    VOCAB,
    accelerated,
    batch,
    fresh,
    future_of,
    lookup_rows,
    new_tokens,
    use_drafter,
    wrong,
)
from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
)

import specdec_kernels as sdk

NEW, K = 32, 6
VERSION = int(transformers.__version__.split(".")[0])


@functools.cache
def model():
    return fresh("phi3")


@functools.cache
def rows():
    return lookup_rows(model())


@functools.cache
def unprocessed(size):
    return new_tokens(model(), batch(rows()[:size]), max_new_tokens=NEW)


class DoubleLast(LogitsProcessor):
    """Depends on the prefix and nothing else."""

    specdec_stateless = True

    def __init__(self):
        self.shapes = []

    def __call__(self, input_ids, scores):
        self.shapes.append(tuple(input_ids.shape))
        scores = scores.clone()
        scores[torch.arange(len(scores)), input_ids[:, -1]] *= 1.5
        return scores


class Counting(LogitsProcessor):
    """Changes with every call and keeps what it saw."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        scores = scores.clone()
        scores[:, len(self.seen) * 7 % VOCAB] += 20.0 * (len(self.seen) % 3 == 0)
        return scores


def top(n=0):
    """Some frequent token of the text."""
    text = unprocessed(1)[0]
    return sorted(set(text), key=text.count)[-1 - n]


def settings(name, size):
    text, width = unprocessed(1)[0], max(map(len, rows()[:size]))
    eos = text[4]
    return {
        "repetition_penalty": lambda: dict(repetition_penalty=1.7),
        "rewarded_repetition": lambda: dict(repetition_penalty=0.8),
        "ignored_prompt": lambda: dict(
            logits_processor=[RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=width)]
        ),
        "ignored_text": lambda: dict(
            logits_processor=[RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=width + 9)]
        ),
        "penalty_with_padding": lambda: dict(
            logits_processor=[RepetitionPenaltyLogitsProcessor(1.7)]
        ),
        "no_repeat_ngram_size": lambda: dict(no_repeat_ngram_size=2),
        "bad_word": lambda: dict(bad_words_ids=[[top()], [top(1)]]),
        "bad_words": lambda: dict(bad_words_ids=[[top()], text[3:5]]),
        "suppress": lambda: dict(suppress_tokens=[top(), top(1), -1]),
        "begin_suppress": lambda: dict(begin_suppress_tokens=[text[0]]),
        "token_bias": lambda: dict(sequence_bias={(top(),): -100.0, (top(1),): 2.5}),
        "sequence_bias": lambda: dict(sequence_bias={(top(),): -100.0, tuple(text[1:3]): 3.0}),
        "min_new_tokens": lambda: dict(min_new_tokens=10, eos_token_id=eos),
        "min_length": lambda: dict(min_length=width + 10, eos_token_id=eos),
        "forced_eos": lambda: dict(forced_eos_token_id=7),
        "decay": lambda: dict(exponential_decay_length_penalty=(12, 1.4), eos_token_id=9),
        "remove_invalid": lambda: dict(remove_invalid_values=True),
        "own": lambda: dict(logits_processor=[DoubleLast()]),
        "user_min_length": lambda: dict(
            logits_processor=[MinLengthLogitsProcessor(width + 6, 9)],
            min_new_tokens=5,
            eos_token_id=9,
        ),
        "warper_of_the_caller": lambda: dict(logits_processor=[TopKLogitsWarper(3)]),
        "in_the_kernel": lambda: dict(
            repetition_penalty=1.3, sequence_bias={(top(),): -3.0}, suppress_tokens=[top(1)]
        ),
        "on_the_walk": lambda: dict(
            repetition_penalty=1.2, bad_words_ids=[text[:2]], no_repeat_ngram_size=4
        ),
    }[name]()


IN_KERNEL = [
    "repetition_penalty",
    "rewarded_repetition",
    "ignored_prompt",
    "penalty_with_padding",
    "bad_word",
    "suppress",
    "token_bias",
    "in_the_kernel",
]
ON_THE_WALK = [
    "ignored_text",
    "no_repeat_ngram_size",
    "bad_words",
    "begin_suppress",
    "sequence_bias",
    "min_new_tokens",
    "min_length",
    "forced_eos",
    "decay",
    "remove_invalid",
    "own",
    "user_min_length",
    "warper_of_the_caller",
    "on_the_walk",
]
CHANGES_NOTHING = ("remove_invalid", "user_min_length", "own", "warper_of_the_caller")


@functools.cache
def plain(name, size):
    return new_tokens(model(), batch(rows()[:size]), max_new_tokens=NEW, **settings(name, size))


def holds(future, b, text):
    return future(b, text)[:K]


def fails(future, b, text):
    """Wrong, but for two right tokens at every fifth length."""
    true = future(b, text)
    return true[:2] if len(text) % 5 == 0 else [wrong(t) for t in true[:K]]


def third_is_wrong(future, b, text):
    return [wrong(t) if i == 2 else t for i, t in enumerate(future(b, text)[:K])]


def assert_exercised(drafts, metrics, drafter):
    """What was drafted and accepted is what the drafter is named for."""
    deepest = max(max(sizes) for sizes in drafter.sizes)
    assert deepest == K and metrics.num_drafts > 0
    if drafts is holds:
        assert metrics.acceptance_rate == 1.0 and metrics.accepted_per_position[K - 1] > 0
    elif drafts is fails:
        assert metrics.acceptance_rate < 0.3 and len(metrics.accepted_per_position) <= 2
    else:
        assert len(metrics.accepted_per_position) == 2
        whole = [n for step in drafter.sizes for n in step if n > 2]
        assert metrics.accepted_per_position[1] >= len(whole)


@pytest.mark.parametrize("drafts", [holds, fails, third_is_wrong], ids=lambda d: d.__name__)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", [*IN_KERNEL, *ON_THE_WALK])
def test_greedy_joint_with_drafters_equals_plain(name, size, drafts, monkeypatch):
    """A25, D05."""
    expected, chosen = plain(name, size), rows()[:size]
    eos = settings(name, size).get("eos_token_id")
    future = future_of(chosen, [t[: t.index(eos) + 1] if eos in t else t for t in expected])
    drafter = use_drafter(monkeypatch, lambda b, text: [drafts(future, b, text)])
    if name in IN_KERNEL:
        monkeypatch.delattr("specdec_kernels.hf.generate.WalkVerifier")
    else:
        monkeypatch.delattr("specdec_kernels.hf.verifier.KernelVerifier")
    options = dict(max_new_tokens=NEW, **settings(name, size))
    with accelerated(model(), num_speculative_tokens=K) as metrics:
        assert new_tokens(model(), batch(chosen), **options) == expected
    assert_exercised(drafts, metrics, drafter)
    if name not in CHANGES_NOTHING:
        assert expected != unprocessed(size)


@pytest.mark.parametrize("name", ["repetition_penalty", "in_the_kernel", "on_the_walk", "own"])
def test_lookups_equal_plain(name):
    with accelerated(model(), num_speculative_tokens=8) as metrics:
        out = new_tokens(model(), batch(rows()), max_new_tokens=NEW, **settings(name, 3))
    assert out == plain(name, 3)
    assert metrics.num_draft_tokens > 0


@pytest.mark.skipif(VERSION < 5, reason="lengths per row came with transformers 5")
@pytest.mark.parametrize("lengths", [(60, 63, 66), (60, 63, 99)])
def test_ignored_prompts_of_different_lengths(lengths, monkeypatch):
    """In the kernel while the prompts end behind them, else cut to the rows that walk."""
    chosen = rows()
    own = RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=torch.tensor(lengths))
    options = dict(logits_processor=[own], max_new_tokens=NEW)
    expected = new_tokens(model(), batch(chosen), **options)
    future = future_of(chosen, expected)
    use_drafter(monkeypatch, lambda b, text: [third_is_wrong(future, b, text)[: 2 + b]])
    with accelerated(model(), num_speculative_tokens=K) as metrics:
        assert new_tokens(model(), batch(chosen), **options) == expected
    assert metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("drafts", [holds, fails, third_is_wrong], ids=lambda d: d.__name__)
def test_a_processor_with_state_joint_with_drafters(drafts, monkeypatch):
    """C20, D12: once per emitted token, in order, on the true prefix."""
    chosen = rows()[2:]
    theirs, ours = Counting(), Counting()
    options = dict(max_new_tokens=NEW)
    expected = new_tokens(model(), batch(chosen), logits_processor=[theirs], **options)
    future = future_of(chosen, expected)
    drafter = use_drafter(monkeypatch, lambda b, text: [drafts(future, b, text)])
    with accelerated(model(), num_speculative_tokens=K) as metrics:
        assert new_tokens(model(), batch(chosen), logits_processor=[ours], **options) == expected
    assert_exercised(drafts, metrics, drafter)
    assert ours.seen == theirs.seen


def test_a_processor_with_state_and_several_rows_runs_plain():
    inputs = batch(rows())
    expected = new_tokens(model(), inputs, logits_processor=[Counting()])
    sdk.patch(model())
    with pytest.warns(UserWarning, match="keep state across rows: Counting"):
        assert new_tokens(model(), inputs, logits_processor=[Counting()]) == expected
    sdk.unpatch(model())


def test_rows_of_one_length_are_processed_together(monkeypatch):
    """One call per level and length; rows of which more was accepted are called apart."""
    expected, chosen = plain("own", 3), rows()
    future = future_of(chosen, expected)
    for lengths in ((4, 4, 4), (4, 1, 4)):
        own = DoubleLast()
        use_drafter(monkeypatch, lambda b, text, n=lengths: [future(b, text)[: n[b]]])
        with accelerated(model(), num_speculative_tokens=K):
            options = dict(logits_processor=[own], max_new_tokens=11)
            assert new_tokens(model(), batch(chosen), **options) == [t[:11] for t in expected]
        start = max(map(len, rows()))
        if lengths[1] == 4:
            assert own.shapes == [(3, start + t) for t in range(11)]
        else:
            assert own.shapes[:6] == [(3, start + t) for t in range(3)] + [
                (2, start + t) for t in range(3, 6)
            ]
            assert sum(n for n, _ in own.shapes) == 3 * 11
