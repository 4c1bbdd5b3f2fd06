"""Several drafters in one run: merged, and in order."""

import pytest
import torch
from test_draft_model import noisy
from test_eagle_text import agreeing
from test_medusa import fitted_heads, write
from test_sampling import FALSE_ALARM, SMALL, WARPED, draw, joints, pvalues
from tiny import accelerated, batch, fresh, lookup_rows, new_tokens, random_rows

import specdec_kernels as sdk
from specdec_kernels import native

pytestmark = pytest.mark.skipif(native.cpu is None, reason=str(native.cpu_error))
COMBINATIONS = ("ngram+suffix", "suffix+draft_model", "ngram,draft_model", "ngram+draft_model")


def options_for(method, draft):
    return {"method": method, **({"model": draft} if "draft_model" in method else {})}


@pytest.fixture(scope="module")
def model():
    return fresh("llama")


@pytest.fixture(scope="module")
def rows(model):
    return lookup_rows(model)


@pytest.mark.parametrize("size", [None, 1, 7])
@pytest.mark.parametrize("method", COMBINATIONS)
def test_greedy_text_is_that_of_plain(model, rows, method, size):
    options = options_for(method, noisy(model, 0.05))
    for inputs in (batch(rows[:1]), batch(rows)):
        expected = new_tokens(model, inputs, max_new_tokens=60)
        with accelerated(model, num_speculative_tokens=size, **options) as metrics:
            for _ in range(2):
                assert new_tokens(model, inputs, max_new_tokens=60) == expected
            if size:
                assert metrics.num_accepted_tokens > 0
                assert set(metrics.snapshot()["drafters"]) <= set(
                    sdk.SpeculativeConfig(**{**options, "num_speculative_tokens": size}).methods
                )


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("method", ["ngram+draft_model", "ngram,draft_model"])
def test_the_draft_model_follows_a_text_that_others_drafted(model, rows, method, topk):
    """The target drafts for itself: right in every round, whatever the lookup put beside it."""
    inputs = batch(rows)
    expected = new_tokens(model, inputs, max_new_tokens=120)
    options = dict(options_for(method, fresh("llama")), draft_tree_topk=topk)
    with accelerated(model, num_speculative_tokens=8, **options) as metrics:
        assert new_tokens(model, inputs, max_new_tokens=120) == expected
    counts = metrics.snapshot()["drafters"]
    own = counts["draft_model"]
    assert own["num_draft_tokens"] > 0
    if topk == 1:
        assert own["num_accepted_tokens"] == own["num_draft_tokens"]
    assert counts["ngram"]["num_accepted_tokens"] <= counts["ngram"]["num_draft_tokens"]


@pytest.mark.parametrize("method", ["ngram+eagle", "ngram,eagle"])
def test_an_eagle_head_follows_a_text_that_others_drafted(method, tmp_path):
    """A head that says nearly what its target says, 0.83 of its tokens when it is alone."""
    target = fresh("llama")
    head = agreeing(target, tmp_path)
    inputs = batch(lookup_rows(target))
    expected = new_tokens(target, inputs, max_new_tokens=100)
    options = dict(num_speculative_tokens=6, prompt_lookup_min=5)
    with accelerated(target, model=head, method=method, **options) as metrics:
        assert new_tokens(target, inputs, max_new_tokens=100) == expected
    assert metrics.snapshot()["drafters"]["ngram"]["num_draft_tokens"] > 0
    own = metrics.snapshot()["drafters"]["eagle"]
    assert own["num_accepted_tokens"] >= 0.6 * own["num_draft_tokens"] > 0


@pytest.mark.parametrize("method", ["ngram+medusa", "ngram,medusa"])
def test_medusa_heads_follow_a_text_that_others_drafted(method, tmp_path):
    target = fresh("llama")
    rows = random_rows((3, 9), seed=3)
    texts = new_tokens(target, batch(rows), max_new_tokens=14)
    weights = fitted_heads(target, [r + t for r, t in zip(rows, texts, strict=True)])
    options = dict(model=write(tmp_path / "h", weights), draft_tree_topk=1)
    with accelerated(target, method=method, num_speculative_tokens=6, **options) as metrics:
        assert new_tokens(target, batch(rows), max_new_tokens=12) == [t[:12] for t in texts]
    own = metrics.snapshot()["drafters"]["medusa"]
    assert 0 < own["num_draft_tokens"] == own["num_accepted_tokens"]


def test_attribution_adds_up_over_calls(model, rows):
    inputs = batch(rows)
    with accelerated(model, method="ngram+suffix", num_speculative_tokens=6) as metrics:
        new_tokens(model, inputs)
        once = metrics.snapshot()["drafters"]
        sdk.suffix_cache(model).clear()
        new_tokens(model, inputs)
        twice = metrics.snapshot()["drafters"]
    assert once["ngram"]["num_accepted_tokens"] > 0
    for name, counts in once.items():
        assert {key: 2 * n for key, n in counts.items()} == twice[name]


def test_a_single_method_has_no_attribution(model, rows):
    with accelerated(model, num_speculative_tokens=6) as metrics:
        new_tokens(model, batch(rows))
        assert metrics.snapshot()["drafters"] == {}


@pytest.mark.parametrize(
    "method, rule, sampling",
    [
        ("suffix+draft_model", "coupled", "greedy"),
        ("ngram+draft_model", "token", "probabilistic"),
        ("ngram+draft_model", "recursive", "greedy"),
        ("ngram,draft_model", "token", "probabilistic"),
        ("ngram,draft_model", "block", "probabilistic"),
    ],
)
def test_exact_joint(method, rule, sampling):
    """A02: sampled text, from drafts of all kinds in one batch."""
    model = fresh("llama", **SMALL)
    torch.manual_seed(5)
    options = dict(options_for(method, noisy(model, 0.3)), rule=rule, num_speculative_tokens=4)
    with accelerated(model, draft_sample_method=sampling, **options) as metrics:
        counts = draw(model, 21_000, **WARPED)
    assert metrics.num_accepted_tokens > 2_000
    assert all(n["num_accepted_tokens"] > 0 for n in metrics.snapshot()["drafters"].values())
    assert min(pvalues(counts, joints("warped"))) > FALSE_ALARM
    assert max(pvalues(counts, joints("plain"))) < FALSE_ALARM


@pytest.mark.parametrize(
    "method, message",
    [
        ("ngram+ngram", "different drafters"),
        ("ngram+none", "different drafters"),
        ("ngram+suffix,draft_model", "joined by"),
        ("ngram+magic", "got 'magic'"),
        ("suffix+draft_model", "model: expected a draft model or heads"),
    ],
)
def test_combinations_that_make_no_sense(method, message):
    with pytest.raises(ValueError, match=message):
        sdk.SpeculativeConfig(method=method)


def test_block_takes_no_merged_trees():
    options = dict(rule="block", suffix_decoding_max_cached_requests=0)
    with pytest.raises(ValueError, match="block"):
        sdk.SpeculativeConfig(method="ngram+suffix", **options)
    assert not sdk.SpeculativeConfig(method="ngram,suffix", **options).merges
