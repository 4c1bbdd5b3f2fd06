"""Stopping criteria of every kind: after the same token as in plain generate."""

import warnings

import pytest
import torch
from tiny import (
    accelerated,
    batch,
    char_tokenizer,
    fresh,
    future_of,
    lookup_rows,
    new_tokens,
    use_drafter,
)
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria

import specdec_kernels as sdk


@pytest.fixture(scope="module")
def model():
    return fresh("phi3")


@pytest.fixture(scope="module")
def rows(model):
    return lookup_rows(model)


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
