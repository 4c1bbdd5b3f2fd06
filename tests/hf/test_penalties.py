"""presence_penalty and frequency_penalty, attributes of the generation config."""

import functools

import pytest
from tiny import accelerated, batch, fresh, future_of, lookup_rows, new_tokens, use_drafter, wrong
from transformers import LogitsProcessor

import specdec_kernels as sdk

NEW, K = 32, 6


@functools.cache
def model():
    return fresh("phi3")


@functools.cache
def rows():
    return lookup_rows(model())


@functools.cache
def unprocessed():
    return new_tokens(model(), batch(rows()), max_new_tokens=NEW)


def third_is_wrong(future, b, text):
    return [wrong(t) if i == 2 else t for i, t in enumerate(future(b, text)[:K])]


class Occurrences(LogitsProcessor):
    """The penalties of the OpenAI API, spelled out."""

    def __init__(self, presence, frequency, start):
        self.presence, self.frequency, self.start = presence, frequency, start

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for b, row in enumerate(input_ids[:, self.start :].tolist()):
            for token in set(row):
                scores[b, token] -= self.frequency * row.count(token)
                scores[b, token] -= self.presence
        return scores


def test_own_penalties(monkeypatch):
    """Attributes of the generation config; transformers has no such processors."""
    own = fresh("phi3")
    inputs, chosen = batch(rows()), rows()
    for presence, frequency in ((0.0, 4.0), (15.0, 0.0), (5.0, 2.5)):
        spelled = Occurrences(presence, frequency, max(map(len, rows())))
        expected = new_tokens(model(), inputs, logits_processor=[spelled], max_new_tokens=NEW)
        assert expected != unprocessed()
        own.generation_config.presence_penalty = presence
        own.generation_config.frequency_penalty = frequency
        future = future_of(chosen, expected)
        use_drafter(monkeypatch, lambda b, text, future=future: [third_is_wrong(future, b, text)])
        for extra in ({}, dict(no_repeat_ngram_size=3), dict(repetition_penalty=1.3)):
            with accelerated(own, num_speculative_tokens=K) as metrics:
                out = new_tokens(own, inputs, max_new_tokens=NEW, **extra)
            if extra:
                both = dict(logits_processor=[spelled], max_new_tokens=NEW, **extra)
                assert out == new_tokens(model(), inputs, **both)
            else:
                assert out == expected and metrics.num_accepted_tokens > 0


def test_own_penalties_of_one_call_and_of_plain_runs():
    """Arguments of generate once the attribute exists, and applied where plain decoding runs."""
    own, inputs = fresh("phi3"), batch(rows())
    own.generation_config.frequency_penalty = None
    spelled = Occurrences(0.0, 3.0, max(map(len, rows())))
    expected = new_tokens(model(), inputs, logits_processor=[spelled], max_new_tokens=NEW)
    with accelerated(own, num_speculative_tokens=K):
        assert new_tokens(own, inputs, max_new_tokens=NEW) == unprocessed()
        assert new_tokens(own, inputs, max_new_tokens=NEW, frequency_penalty=3.0) == expected
        for value in ("much", True, float("nan")):
            with pytest.raises(TypeError, match="frequency_penalty as a finite number"):
                new_tokens(own, inputs, frequency_penalty=value)
    sdk.patch(own)
    with pytest.warns(UserWarning, match="use_cache=False"):
        out = new_tokens(own, inputs, max_new_tokens=NEW, frequency_penalty=3.0, use_cache=False)
    assert out == expected
