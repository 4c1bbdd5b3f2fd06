"""The config key `rule`: what each means for greedy text, for lookups, for text on the walk."""

import warnings

import pytest
import torch
from tiny import accelerated, batch, fresh, lookup_rows, new_tokens

import specdec_kernels as sdk
from specdec_kernels.drafting.factory import make_drafter

RULES = ("auto", "coupled", "token", "recursive", "block", "typical")
SAMPLED = dict(do_sample=True, max_new_tokens=32, temperature=0.2, top_k=0)


@pytest.fixture(scope="module")
def model():
    return fresh("phi3")


@pytest.fixture(scope="module")
def rows(model):
    return lookup_rows(model)


def patched(model, rule, **options):
    """Patched, with the warning that `typical` gives and no other."""
    if rule != "typical":
        return accelerated(model, rule=rule, **options)
    return accelerated(model, rule=rule, allowed="rule 'typical' is lossy", **options)


def spy(monkeypatch):
    """The arguments of every rejection_sample from here on."""
    from specdec_kernels.decoding import verify

    calls, original = [], verify.rejection_sample

    def recorded(logits, ids, parents, num_nodes, sampling, **options):
        calls.append((parents, sampling, options))
        return original(logits, ids, parents, num_nodes, sampling, **options)

    monkeypatch.setattr(verify, "rejection_sample", recorded)
    return calls


@pytest.mark.parametrize("rule", RULES)
def test_greedy_text_is_exact(model, rows, rule, monkeypatch):
    """By verify_greedy, and by rejection_sample when the logits are edited."""
    calls = spy(monkeypatch)
    for settings in ({}, dict(repetition_penalty=1.3)):
        expected = new_tokens(model, batch(rows), **settings)
        with accelerated(model, rule=rule, num_speculative_tokens=8) as metrics:
            assert new_tokens(model, batch(rows), **settings) == expected
        assert metrics.num_draft_tokens > 0
    assert {options["rule"] for _, _, options in calls} == {"coupled"}


@pytest.mark.parametrize("rule", RULES)
def test_sampling_with_lookups(model, rows, rule, monkeypatch):
    """Rule and thresholds reach the kernel, steps count on, `block` gets chains."""
    calls = spy(monkeypatch)
    options = dict(posterior_threshold=0.2, posterior_alpha=0.5, seed=3)
    with patched(model, rule, num_speculative_tokens=8, **options) as metrics:
        texts = new_tokens(model, batch(rows), **SAMPLED)
        assert new_tokens(model, batch(rows), **SAMPLED) == texts
    assert metrics.num_accepted_tokens > 0 and all(0 <= t < 96 for row in texts for t in row)
    half = len(calls) // 2
    for i, (_, sampling, given) in enumerate(calls):
        assert sampling.step.tolist() == [1 + i % half] * 3
        assert (given["rule"], given["posterior_threshold"], given["posterior_alpha"]) == (
            rule,
            0.2,
            0.5,
        )
    branches = [
        (parents[:, 1:] >= 0) & (parents[:, 1:] != torch.arange(parents.shape[1] - 1))
        for parents, _, _ in calls
    ]
    assert any(b.any() for b in branches) == (rule != "block")


@pytest.mark.parametrize("rule", RULES)
def test_on_the_walk_every_rule_is_coupled(model, rows, rule):
    options = dict(SAMPLED, no_repeat_ngram_size=6)
    with accelerated(model, seed=3, method="none"):
        expected = new_tokens(model, batch(rows), **options)
    with accelerated(model, seed=3, rule=rule, num_speculative_tokens=8) as metrics:
        assert new_tokens(model, batch(rows), **options) == expected
    assert metrics.num_accepted_tokens > 0


def test_first_tokens_under_block_are_drawn_at_step_zero(model, rows, monkeypatch):
    """A position of the prompt's end could equal a later step."""
    from specdec_kernels.decoding import verify

    positions, original = {}, verify.sample

    def recorded(logits, sampling, **options):
        positions[rule] = sampling.position.tolist()
        return original(logits, sampling, **options)

    monkeypatch.setattr(verify, "sample", recorded)
    for rule in ("block", "recursive"):
        with accelerated(model, rule=rule):
            new_tokens(model, batch(rows), **SAMPLED)
    assert positions == {"block": [0] * 3, "recursive": [len(row) for row in rows]}


def test_lookups_for_block_are_chains():
    for rule in RULES:
        drafter = make_drafter(sdk.SpeculativeConfig(rule=rule), frozenset())
        assert drafter.num_matches == (1 if rule == "block" else 3)


def test_what_is_refused(model):
    with pytest.raises(ValueError, match="one of auto, coupled, token, recursive, block, typical"):
        sdk.patch(model, rule="strict")
    with pytest.raises(ValueError, match="rng: expected one of philox, torch, got 'cpu'"):
        sdk.patch(model, rng="cpu")
    for value in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="posterior_alpha: expected a number from 0 to 1"):
            sdk.patch(model, posterior_alpha=value)
    with pytest.raises(TypeError, match="posterior_threshold: expected a number"):
        sdk.patch(model, posterior_threshold="low")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sdk.patch(model, rule="typical")  # says so when it samples
        sdk.unpatch(model)
    assert not [w for w in caught if "specdec_kernels" in str(w.message)]
