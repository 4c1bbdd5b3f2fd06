"""Scores and logits that generate returns: those of plain generate for every emitted token."""

import pytest
import torch
from tiny import accelerated, batch, fresh, future_of, lookup_rows, new_tokens, use_drafter


@pytest.fixture(scope="module")
def model():
    return fresh("phi3")


@pytest.fixture(scope="module")
def rows(model):
    return lookup_rows(model)


EVERYTHING = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)


def assert_same_numbers(ours, theirs, width):
    """Where a row had not finished; padding is 0."""
    assert torch.equal(ours.sequences, theirs.sequences)
    pads = theirs.sequences[:, width:] == 0
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(theirs[name]) == pads.shape[1]
        for t, (a, b) in enumerate(zip(ours[name], theirs[name], strict=True)):
            kept = ~pads[:, t]
            assert a.shape == b.shape and a.dtype == b.dtype
            largest = float(b[kept].nan_to_num(neginf=0.0).abs().max())
            torch.testing.assert_close(a[kept], b[kept], atol=1e-5 * largest, rtol=0)


def assert_same_transitions(model, ours, theirs, width):
    """compute_transition_scores, the log-probabilities that users read."""
    kept = theirs.sequences[:, width:] != 0
    for normalised in (True, False):
        a, b = (
            model.compute_transition_scores(o.sequences, o.scores, normalize_logits=normalised)
            for o in (ours, theirs)
        )
        assert a.shape == b.shape
        torch.testing.assert_close(a[kept], b[kept], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 3])
def test_greedy(model, rows, size, monkeypatch):
    """A28: same number, same values, logits untouched by processors."""
    inputs = batch(rows[:size])
    options = dict(
        max_new_tokens=24,
        do_sample=False,
        repetition_penalty=1.2,
        suppress_tokens=[5, 6],
        eos_token_id=new_tokens(model, batch(rows[:1]), repetition_penalty=1.2)[0][13],
        **EVERYTHING,
    )
    expected = model.generate(**inputs, **options)
    width = inputs["input_ids"].shape[1]
    future = future_of(rows[:size], expected.sequences[:, width:].tolist())
    use_drafter(monkeypatch, lambda b, text: [[*future(b, text)[:3], 5]])
    with accelerated(model, num_speculative_tokens=4) as metrics:
        got = model.generate(**inputs, **options)
    assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens
    assert_same_numbers(got, expected, width)
    assert_same_transitions(model, got, expected, width)


@pytest.mark.parametrize(
    "settings",
    [dict(top_k=0), dict(temperature=0.7, top_k=40, top_p=0.95, repetition_penalty=1.2)],
    ids=str,
)
def test_sampled(model, rows, settings, monkeypatch):
    """With torch's generator the text is that of plain generate, and so are its scores."""
    inputs = batch(rows[:1])
    options = dict(max_new_tokens=24, do_sample=True, **settings, **EVERYTHING)
    torch.manual_seed(3)
    expected = model.generate(**inputs, **options)
    width = inputs["input_ids"].shape[1]
    future = future_of(rows[:1], expected.sequences[:, width:].tolist())
    use_drafter(monkeypatch, lambda b, text: [[*future(b, text)[:3], 5]])
    torch.manual_seed(3)
    with accelerated(model, rng="torch", num_speculative_tokens=4) as metrics:
        got = model.generate(**inputs, **options)
    assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens
    assert_same_numbers(got, expected, width)
    assert_same_transitions(model, got, expected, width)


def test_seeded_scores_belong_to_the_tokens(model, rows):
    """Three rows drawn by seeds: each score is what plain computes for the text before it."""
    inputs = batch(rows)
    width = inputs["input_ids"].shape[1]
    options = dict(max_new_tokens=16, do_sample=True, temperature=0.3, top_k=0)
    with accelerated(model, seed=4, num_speculative_tokens=6) as metrics:
        got = model.generate(**inputs, **options, **EVERYTHING)
    assert metrics.num_accepted_tokens > 0
    ids, mask = got.sequences, torch.ones_like(got.sequences)
    mask[:, :width] = inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits[:, width - 1 : -1]
    for t in range(16):
        torch.testing.assert_close(got.logits[t], logits[:, t], atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(got.scores[t], got.logits[t] / 0.3, atol=0, rtol=0)


@pytest.mark.parametrize(
    "asked", [dict(), dict(output_scores=True), dict(output_logits=True)], ids=str
)
def test_only_what_was_asked_for_is_returned(model, rows, asked):
    options = dict(max_new_tokens=4, return_dict_in_generate=True, do_sample=False, **asked)
    expected = model.generate(**batch(rows), **options)
    with accelerated(model):
        got = model.generate(**batch(rows), **options)
    assert isinstance(got, type(expected))
    assert torch.equal(got.sequences, expected.sequences)
    for name in ("scores", "logits", "attentions", "hidden_states"):
        assert (got.get(name) is None) == (expected.get(name) is None)
