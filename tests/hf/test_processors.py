"""Logits processors, stopping criteria, scores: what plain generate computes, at every token."""

import math
import warnings

import pytest
import torch
from tiny import (
    VOCAB,
    accelerated,
    batch,
    char_tokenizer,
    fresh,
    future_of,
    lookup_rows,
    new_tokens,
    use_drafter,
)
from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    StoppingCriteria,
)

import specdec_kernels as sdk


@pytest.fixture(scope="module")
def model():
    return fresh("phi3")


@pytest.fixture(scope="module")
def rows(model):
    return lookup_rows(model)


class DoubleLast(LogitsProcessor):
    """Depends on the prefix and nothing else."""

    specdec_stateless = True

    def __call__(self, input_ids, scores):
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


def top(text, n=0):
    """Some frequent token of a text."""
    return sorted(set(text), key=text.count)[-1 - n]


def settings(text):
    return {
        "repetition_penalty": dict(repetition_penalty=1.7),
        "no_repeat_ngram_size": dict(no_repeat_ngram_size=2),
        "bad_words": dict(bad_words_ids=[[top(text)], text[3:5]]),
        "suppress": dict(suppress_tokens=[top(text), top(text, 1)]),
        "begin_suppress": dict(begin_suppress_tokens=[text[0]]),
        "sequence_bias": dict(sequence_bias={(top(text),): -100.0, tuple(text[1:3]): 3.0}),
        "min_new_tokens": dict(min_new_tokens=10, eos_token_id=text[4]),
        "min_length": dict(min_length=70, eos_token_id=text[4]),
        "forced_eos": dict(forced_eos_token_id=7),
        "decay": dict(exponential_decay_length_penalty=(12, 1.4), eos_token_id=9),
        "remove_invalid": dict(remove_invalid_values=True),
        "own": dict(logits_processor=[DoubleLast()]),
        "user_min_length": dict(
            logits_processor=[MinLengthLogitsProcessor(66, 9)], min_new_tokens=5, eos_token_id=9
        ),
        "several": dict(repetition_penalty=1.2, bad_words_ids=[text[:2]], no_repeat_ngram_size=4),
    }


@pytest.fixture(scope="module")
def unprocessed(model, rows):
    return {size: new_tokens(model, batch(rows[:size])) for size in (1, 3)}


@pytest.mark.parametrize("name", settings([1, 2, 3, 4, 5, 6]))
@pytest.mark.parametrize("size", [1, 3])
def test_processors_equal_plain(model, rows, unprocessed, name, size):
    """A25, D05."""
    inputs = batch(rows[:size])
    options = settings(unprocessed[1][0])[name]
    expected = new_tokens(model, inputs, **options)
    with accelerated(model, num_speculative_tokens=8) as metrics:
        assert new_tokens(model, inputs, **options) == expected
    assert metrics.num_draft_tokens > 0
    if name not in ("repetition_penalty", "no_repeat_ngram_size", "several"):
        assert metrics.num_accepted_tokens > 0
    if name not in ("remove_invalid", "user_min_length", "own"):
        assert expected != unprocessed[size]  # the setting did something


def test_a_processor_with_state_is_called_as_plain_calls_it(model, rows):
    """C20, D12: once per emitted token, in order, on the true prefix."""
    inputs = batch(rows[2:])
    plain, ours = Counting(), Counting()
    expected = new_tokens(model, inputs, logits_processor=[plain])
    with accelerated(model, num_speculative_tokens=8) as metrics:
        assert new_tokens(model, inputs, logits_processor=[ours]) == expected
    assert metrics.num_accepted_tokens > 0
    assert ours.seen == plain.seen


def test_a_processor_with_state_and_several_rows_runs_plain(model, rows):
    inputs = batch(rows)
    expected = new_tokens(model, inputs, logits_processor=[Counting()])
    sdk.patch(model)
    with pytest.warns(UserWarning, match="keep state across rows: Counting"):
        assert new_tokens(model, inputs, logits_processor=[Counting()]) == expected
    sdk.unpatch(model)


class Machine(LogitsProcessor):
    """A grammar that allows one path, known by the prefix, and ends in the middle of a block."""

    def __init__(self, start, path):
        self.start, self.path = start, path

    def __call__(self, input_ids, scores):
        allowed = self.path[min(input_ids.shape[1] - self.start, len(self.path) - 1)]
        blocked = torch.full_like(scores, -math.inf)
        blocked[:, allowed] = scores[:, allowed]
        return blocked


def test_grammars(model, rows, monkeypatch):
    """D12: one allowed path, by a processor and by prefix_allowed_tokens_fn."""
    inputs = batch(rows[:1])
    width = inputs["input_ids"].shape[1]
    path = [11, 12, 13, 11, 12, 14, 15, 16, 90]
    drafter = use_drafter(monkeypatch, lambda b, text: [(path + path)[len(text) - width :][:6]])
    by_function = dict(
        prefix_allowed_tokens_fn=lambda b, ids: [path[min(len(ids) - width, len(path) - 1)]]
    )
    for options in (dict(logits_processor=[Machine(width, path)]), by_function):
        expected = new_tokens(model, inputs, eos_token_id=90, **options)
        assert expected == [path]
        with accelerated(model, num_speculative_tokens=6) as metrics:
            assert new_tokens(model, inputs, eos_token_id=90, **options) == expected
        assert metrics.num_steps == 2 and drafter.sizes


@pytest.mark.parametrize("size", [1, 3])
def test_scores_and_logits_equal_plain(model, rows, size, monkeypatch):
    """A28: same number, same values, logits untouched by processors."""
    inputs = batch(rows[:size])
    options = dict(
        max_new_tokens=24,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        repetition_penalty=1.2,
        eos_token_id=new_tokens(model, batch(rows[:1]), repetition_penalty=1.2)[0][13],
    )
    expected = model.generate(**inputs, **options)
    width = inputs["input_ids"].shape[1]
    future = future_of(rows[:size], expected.sequences[:, width:].tolist())
    use_drafter(monkeypatch, lambda b, text: [[*future(b, text)[:3], 5]])
    with accelerated(model, num_speculative_tokens=4) as metrics:
        got = model.generate(**inputs, **options)
    assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens
    assert torch.equal(got.sequences, expected.sequences)
    pads = expected.sequences[:, width:] == 0
    for name in ("scores", "logits"):
        ours, theirs = got[name], expected[name]
        assert len(ours) == len(theirs) == expected.sequences.shape[1] - width
        for t, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            kept = ~pads[:, t]
            assert a.shape == b.shape and a.dtype == b.dtype
            torch.testing.assert_close(a[kept], b[kept], atol=1e-5 * b.abs().max(), rtol=0)


@pytest.mark.parametrize(
    "asked", [dict(), dict(output_scores=True), dict(output_logits=True)], ids=str
)
def test_only_what_was_asked_for_is_returned(model, rows, asked):
    options = dict(max_new_tokens=4, return_dict_in_generate=True, do_sample=False, **asked)
    expected = model.generate(**batch(rows), **options)
    with accelerated(model):
        got = model.generate(**batch(rows), **options)
    assert type(got) is type(expected)
    assert torch.equal(got.sequences, expected.sequences)
    for name in ("scores", "logits", "attentions", "hidden_states"):
        assert (got.get(name) is None) == (expected.get(name) is None)


class StopsAt(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


def test_own_stopping_criteria(model, rows):
    """At batch 1 after every accepted token, so also in the middle of a block."""
    inputs = batch(rows[:1])
    text = new_tokens(model, inputs)[0]
    with accelerated(model, num_speculative_tokens=8) as metrics:
        for token in sorted(set(text)):
            got = new_tokens(model, inputs, stopping_criteria=[StopsAt(token)])
            assert got == [text[: text.index(token) + 1]]
    assert metrics.num_accepted_tokens > 0


def test_own_stopping_criteria_with_several_rows_run_plain(model, rows):
    options = dict(stopping_criteria=[StopsAt(5)], eos_token_id=7)
    expected = new_tokens(model, batch(rows), **options)
    sdk.patch(model)
    with pytest.warns(UserWarning, match="stopping criteria.*StopsAt"):
        assert new_tokens(model, batch(rows), **options) == expected
    sdk.unpatch(model)


class HalfLength(MaxLengthCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.max_length // 2)


def test_built_in_criteria_of_the_callers_own(model, rows):
    """Taken from the list that was passed, not from the generation config."""
    inputs = batch(rows)
    width = inputs["input_ids"].shape[1]
    text = new_tokens(model, inputs)[0]
    for criterion in (EosTokenCriteria(text[5]), MaxLengthCriteria(width + 9)):
        expected = new_tokens(model, inputs, stopping_criteria=[criterion])
        with accelerated(model, num_speculative_tokens=8):
            assert new_tokens(model, inputs, stopping_criteria=[criterion]) == expected
    own = HalfLength(2 * (width + 9))
    expected = new_tokens(model, batch(rows[2:]), stopping_criteria=[own])
    with warnings.catch_warnings(), sdk.patched(model):
        warnings.simplefilter("ignore")
        assert new_tokens(model, batch(rows[2:]), stopping_criteria=[own]) == expected


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("eos", [None, 95])
def test_stop_strings(model, rows, size, eos):
    """Strings of two and three tokens; without an EOS, plain never pads the rows that stopped."""
    tokenizer = char_tokenizer()
    inputs = batch(rows[:size])
    texts = new_tokens(model, inputs)
    stops = [tokenizer.decode(texts[0][7:10]), tokenizer.decode(texts[-1][12:14])]
    options = dict(stop_strings=stops, tokenizer=tokenizer, eos_token_id=eos)
    expected = new_tokens(model, inputs, **options)
    assert len(expected[0]) < 48 or size == 3
    with warnings.catch_warnings(), sdk.patched(model, num_speculative_tokens=8) as _:
        if eos is not None or size == 1:
            warnings.filterwarnings("error", message="specdec_kernels")
        else:
            warnings.simplefilter("ignore")
        assert new_tokens(model, inputs, **options) == expected


def test_max_time_stops(model, rows):
    with accelerated(model):
        assert 1 <= len(new_tokens(model, batch(rows), max_time=0.0)[0]) < 48


def test_stops_inside_a_block_of_accepted_tokens(model, rows, monkeypatch):
    """With a drafter that is always right, so that every stop falls into a block."""
    inputs = batch(rows[:1])
    prompts = rows[:1]
    texts = new_tokens(model, inputs)
    use_drafter(monkeypatch, lambda b, text: [future_of(prompts, texts)(b, text)[:6]])
    tokenizer = char_tokenizer()
    for at in range(1, 14):
        token = texts[0][at]
        kept = texts[0][: texts[0].index(token) + 1]
        for options in (
            dict(stopping_criteria=[StopsAt(token)]),
            dict(stop_strings=[tokenizer.decode([token])], tokenizer=tokenizer),
            dict(eos_token_id=[token, 0]),
        ):
            with accelerated(model, num_speculative_tokens=6) as metrics:
                assert new_tokens(model, inputs, **options) == [kept]
            assert metrics.num_new_tokens == len(kept)
