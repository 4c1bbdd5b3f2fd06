"""rejection_sample as a distribution: toy models decoded for several steps, as users can."""

from functools import cache, partial

import pytest
import torch
from helpers import backends

from specdec_kernels.ops import _random
from specdec_kernels.ops.rejection_sample import rejection_sample
from specdec_kernels.ops.sample import sample
from specdec_kernels.testing import (
    FALSE_ALARM,
    FILTERS,
    WINDOWS,
    Decoder,
    check_sampler,
    chi_square_pvalue,
    gumbel_draws,
    plain_verify,
    toy_models,
)
from specdec_kernels.testing.checks import WINDOWS_OF_RULE
from specdec_kernels.tree import SamplingParams

BACKENDS = backends("rejection_sample")

# The reference walks row by row in Python: it is held to these backends token by token elsewhere.
# So is what runs in an interpreter.
NATIVE = [b for b in BACKENDS if b not in ("reference", "triton")]
RULES = ("coupled", "token", "recursive", "block")
TEMPERATURE = {"temperature": FILTERS["temperature"]}
ROWS = 200_000


def sampler(rule, backend):
    return partial(rejection_sample, rule=rule, backend=backend)


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("rule", RULES)
def test_joint(backend, rule):
    report = check_sampler(sampler(rule, backend), rule=rule, rows=ROWS, filters=TEMPERATURE)
    assert report.passed, str(report)


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("rule", RULES)
def test_joint_with_filters_penalties_and_bias(backend, rule):
    filters = {"every filter": FILTERS["every filter"]}
    report = check_sampler(sampler(rule, backend), rule=rule, rows=ROWS // 16, filters=filters)
    assert report.passed, str(report)


@cache
def decoder(window="sampled chain", setting="temperature", rule="token"):
    draw = partial(gumbel_draws, rule=rule)
    return Decoder(*toy_models(), WINDOWS[window], FILTERS[setting], draw)


@pytest.mark.parametrize("backend", NATIVE)
def test_joint_with_sampled_drafts_taken_for_one_hot(backend):
    """Leaving draft_logits out accepts less, and stays exact."""

    def verify(*args, draft_logits):
        return rejection_sample(*args, rule="token", backend=backend)

    windows = ["sampled chain"]
    report = check_sampler(verify, windows=windows, rows=ROWS // 4, filters=TEMPERATURE)
    assert report.passed, str(report)
    text = decoder().start(torch.arange(2000), 3)
    _, less = decoder().step(verify, text)
    _, more = decoder().step(sampler("token", backend), text)
    assert int(less.num_accepted.sum()) < 0.9 * int(more.num_accepted.sum())


@pytest.mark.parametrize("backend", NATIVE)
def test_joint_of_coupled_with_drafts_of_the_same_noise(backend):
    """The one rule whose drafts may share the target's noise: more of them stand."""
    verify, shared = sampler("coupled", backend), partial(gumbel_draws, stream=_random.BONUS)
    options = {"windows": ["sampled chain"], "rows": ROWS // 4, "filters": TEMPERATURE}
    report = check_sampler(verify, draw=shared, **options)
    assert report.passed, str(report)
    rates = []
    for draw in (gumbel_draws, shared):
        case = decoder()._replace(draw=draw)
        _, result = case.step(verify, case.start(torch.arange(2000), 3))
        rates.append(float(result.num_accepted.float().mean()))
    assert rates[1] > 1.5 * rates[0]


@pytest.mark.parametrize("backend", NATIVE)
def test_negative_control_wrong_draft_probabilities(backend):
    def verify(*args, draft_logits):
        return sampler("token", backend)(*args, draft_logits=draft_logits * 0.7)

    options = {"windows": ["sampled chain"], "rows": ROWS // 4, "filters": TEMPERATURE}
    assert not check_sampler(verify, **options).passed


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("stream", [_random.RESIDUAL, _random.ACCEPT])
def test_negative_control_shared_noise(backend, stream):
    """Drafts drawn with the very numbers that verification uses."""
    report = check_sampler(
        sampler("token", backend),
        windows=["sampled chain"],
        rows=ROWS // 4,
        filters=TEMPERATURE,
        draw=partial(gumbel_draws, stream=stream),
    )
    assert not report.passed


@pytest.mark.parametrize("backend", NATIVE)
def test_negative_control_block_drafts_drawn_by_position(backend):
    """Their numbers come again in the next step, where part of them has already been looked at."""
    report = check_sampler(
        sampler("block", backend),
        windows=["long sampled chain"],
        rows=ROWS // 4,
        filters=TEMPERATURE,
        draw=gumbel_draws,
    )
    assert not report.passed


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("rule", ["token", "coupled"])
def test_joint_of_one_hot_siblings(backend, rule):
    """Each sibling is accepted with exactly its own probability, in any order, duplicates too."""
    rows, vocab = 60000, 8
    target = torch.randn(vocab, generator=torch.Generator().manual_seed(11))
    ids = torch.tensor([[0, 5, 2, 5, 9, 6]]).expand(rows, -1)
    parents = torch.tensor([[-1, 0, 0, 0, 0, 0]], dtype=torch.int32).expand(rows, -1)
    result = rejection_sample(
        target.expand(rows, 6, -1), ids, parents, torch.full((rows,), 6, dtype=torch.int32),
        SamplingParams.make(rows, seed=range(rows)), rule=rule, backend=backend,
    )  # fmt: skip
    tokens = result.output_token_ids[:, 0]
    exact = torch.softmax(target.double(), -1)
    assert chi_square_pvalue(tokens.bincount(minlength=vocab), exact) > FALSE_ALARM
    drafted = torch.isin(tokens, torch.tensor([5, 2, 6]))
    assert torch.equal(result.num_accepted == 1, drafted)


@pytest.mark.parametrize("backend", ["reference", *NATIVE])
@pytest.mark.parametrize("setting", FILTERS)
def test_coupled_seed_gives_the_text_of_undrafted_sampling(backend, setting):
    """Whatever the drafter and the tree."""
    rows, size = (40 if backend == "reference" else 2000), 6
    plain = decoder("deterministic tree", setting, rule="coupled")
    text = plain.start(torch.arange(rows), size)
    for _ in range(size):
        logits = plain.target.logits(*text.last_two())
        token = sample(logits, text.sampling(plain.filters, plain.target.vocab), backend=backend)
        text.append(torch.arange(rows), token.unsqueeze(1))
    for window in WINDOWS:
        drafted = decoder(window, setting, rule="coupled")
        found = drafted.run(sampler("coupled", backend), torch.arange(rows), size)
        assert torch.equal(found.generated[:, :size], text.generated)


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("rule, window", [(r, w) for r in RULES for w in WINDOWS_OF_RULE[r]])
def test_same_seed_same_text_as_the_verifier_of_the_controls(backend, rule, window):
    """The kernels against the vectorised PyTorch, over several steps."""
    for setting in FILTERS:
        case = decoder(window, setting, rule)
        seeds = torch.arange(3000)
        ours = case.run(sampler(rule, backend), seeds, 7)
        plain = case.run(partial(plain_verify, rule=rule), seeds, 7)
        differs = (ours.generated[:, :7] != plain.generated[:, :7]).any(1)
        assert int(differs.sum()) <= 2  # rounding decides a row in a million


def test_seed_of_a_drawn_draft_is_that_of_sample():
    """One sibling of `gumbel_draws` is what `sample(stream="draft")` draws."""
    rows = 500
    logits = torch.randn(rows, 11, generator=torch.Generator().manual_seed(2))
    sampling = SamplingParams.make(rows, seed=range(rows), position=range(rows))
    drawn = gumbel_draws(logits, sampling, 2, 1)[:, 0]
    at = sampling._replace(position=sampling.position + 2)
    assert torch.equal(drawn, sample(logits, at, stream="draft"))
