"""Method "synthetic": drafts as good as one asks for, the text that of plain."""

import pytest
from scipy.stats import binom
from tiny import accelerated, batch, fresh, lookup_rows, new_tokens

from specdec_kernels import planner
from specdec_kernels.config import SpeculativeConfig
from specdec_kernels.drafting.synthetic import Recorded


@pytest.fixture(scope="module")
def model():
    return fresh("llama")


@pytest.fixture(scope="module")
def rows(model):
    return lookup_rows(model)


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("count", [1, 3])
def test_the_first_call_records_and_the_second_drafts(model, rows, rate, count):
    inputs = batch(rows[:count])
    expected = new_tokens(model, inputs)
    options = dict(synthetic_acceptance_rate=rate, num_speculative_tokens=4)
    with accelerated(model, method="synthetic", **options) as metrics:
        assert new_tokens(model, inputs) == expected
        assert metrics.num_draft_tokens == 0
        assert new_tokens(model, inputs) == expected
        assert metrics.num_drafts > 0
        if rate in (0.0, 1.0):
            assert metrics.acceptance_rate == rate


def test_sampled_text_with_a_seed(model, rows):
    inputs = batch(rows[:1])
    options = dict(do_sample=True, temperature=0.8, top_k=20)
    with accelerated(model, method="synthetic", seed=7, synthetic_acceptance_rate=1.0) as metrics:
        first = new_tokens(model, inputs, **options)
        assert new_tokens(model, inputs, **options) == first
        assert metrics.acceptance_rate == 1.0 and metrics.num_accepted_tokens > 0


def test_tokens_are_right_as_often_as_asked(model, rows):
    """The first drafted token is right in a share of the steps that only chance explains, and a
    step emits what the arithmetic says."""
    rate, k = 0.7, 3
    inputs = batch(rows[:1])
    options = dict(synthetic_acceptance_rate=rate, num_speculative_tokens=k)
    with accelerated(model, method="synthetic", **options) as metrics:
        new_tokens(model, inputs, max_new_tokens=400)
        metrics.reset()
        new_tokens(model, inputs, max_new_tokens=400)
    right, tried = metrics.accepted_per_position[0], metrics.num_drafts
    low, high = binom.interval(1 - 1e-6, tried, rate)
    assert low <= right <= high
    assert metrics.mean_acceptance_length == pytest.approx(
        planner.expected_tokens(rate, k), rel=0.15
    )


def test_other_prompts_and_longer_texts(model, rows):
    """What was recorded of one prompt says nothing about another, and ends where it ended."""
    first, other = batch(rows[:1]), batch(rows[1:2])
    expected = new_tokens(model, other)
    longer = new_tokens(model, first, max_new_tokens=60)
    with accelerated(model, method="synthetic", num_speculative_tokens=4) as metrics:
        new_tokens(model, first, max_new_tokens=12)
        assert new_tokens(model, other) == expected
        assert metrics.num_draft_tokens == 0
        assert new_tokens(model, first, max_new_tokens=60) == longer
        assert metrics.num_draft_tokens > 0


def test_the_store_is_bounded_and_keeps_the_longest():
    recorded = Recorded(most=2)
    recorded.add((1,), [5, 6])
    recorded.add((1,), [5])
    assert recorded.after((1,)) == [5, 6]
    recorded.add((2,), [7])
    recorded.add((3,), [8])
    assert [recorded.after((n,)) for n in (1, 2, 3)] == [[], [7], [8]]


def test_it_stands_alone():
    with pytest.raises(ValueError, match="expected different drafters to combine"):
        SpeculativeConfig(method="synthetic+ngram")
    with pytest.raises(ValueError, match="synthetic_acceptance_rate: expected a number from 0 to"):
        SpeculativeConfig(method="synthetic", synthetic_acceptance_rate=1.5)
