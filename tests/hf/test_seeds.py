"""What a seed means: the same text, whatever is drafted, batched or returned (A10, A29)."""

import pytest
import torch
from tiny import (
    accelerated,
    batch,
    fresh,
    future_of,
    lookup_rows,
    new_tokens,
    random_rows,
    use_drafter,
    wrong,
)
from transformers import LogitsProcessor

import specdec_kernels as sdk


@pytest.fixture(scope="module")
def larger():
    return fresh("phi3")


SETTINGS = [
    dict(temperature=0.7, top_k=0),
    dict(temperature=0.6, top_k=30, top_p=0.95),
    dict(temperature=0.6, top_k=0, min_p=0.02),
    dict(temperature=0.35, top_k=0, typical_p=0.9),
    dict(temperature=0.35, top_k=0, epsilon_cutoff=0.01, eta_cutoff=0.02),
    dict(temperature=0.5, top_k=20, repetition_penalty=1.05),
    dict(temperature=0.4, top_k=0, repetition_penalty=1.05, no_repeat_ngram_size=5),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_one_seed_one_text(larger, settings):
    """A29: whatever the batch, the padding, the size of the tree, and with drafting off."""
    rows = lookup_rows(larger)
    seeds = (11, 12, 13)
    options = dict(do_sample=True, max_new_tokens=32, **settings)

    def texts(chosen, extra=None, **config):
        inputs = batch([rows[b] for b in chosen] + ([extra] if extra else []))
        config["seed"] = tuple(seeds[b] for b in chosen) + ((99,) if extra else ())
        with accelerated(larger, **config) as metrics:
            out = new_tokens(larger, inputs, **options)
        drafted.append(metrics.num_accepted_tokens)
        return out[: len(chosen)]

    drafted = []
    expected = texts((0, 1, 2), method="none")
    assert len({tuple(t) for t in expected}) == 3
    for size in (1, 3, 8, None):
        assert texts((0, 1, 2), num_speculative_tokens=size) == expected
    assert texts((2, 0), num_speculative_tokens=8) == [expected[2], expected[0]]
    for b in range(3):
        assert texts((b,)) == [expected[b]]
    long = random_rows((90,))[0]
    assert texts((0, 1, 2), extra=long, num_speculative_tokens=3) == expected
    assert drafted[0] == 0 and sum(drafted) > 0


class Forbids(LogitsProcessor):
    """Every third token after an even one, by scores and by masks."""

    specdec_stateless = True

    def allowed(self, input_ids, vocab):
        token = torch.arange(vocab)
        return (token % 3 != 0) | (input_ids[:, -1:] % 2 == 1)

    def __call__(self, input_ids, scores):
        allowed = self.allowed(input_ids, scores.shape[-1])
        return scores.masked_fill(~allowed, -torch.inf)

    def allowed_tokens(self, input_ids):
        bits = self.allowed(input_ids, 96).view(len(input_ids), 3, 32).long()
        return (bits << torch.arange(32)).sum(-1).to(torch.int32)


EDITS = [
    dict(repetition_penalty=1.2),
    dict(repetition_penalty=0.85),
    dict(sequence_bias={(7,): 3.25, (50,): -2.5, (13,): float("-inf")}),
    dict(suppress_tokens=list(range(10, 40)), bad_words_ids=[[3], [4]]),
    dict(presence_penalty=1.5, frequency_penalty=0.75),
    dict(logits_processor=[Forbids()]),
    dict(
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        sequence_bias={(t,): 0.01 * t for t in range(0, 96, 5)},
        suppress_tokens=[8, 9],
        logits_processor=[Forbids()],
        top_k=40,
        top_p=0.98,
        min_p=0.001,
    ),
]


@pytest.mark.parametrize("settings", EDITS)
@pytest.mark.parametrize("sampled", [False, True])
def test_seeded_text_of_the_kernel_is_that_of_the_processors(settings, sampled, monkeypatch):
    """Scores are kept on the walk, which calls transformers' own processors."""
    model = fresh("phi3")
    model.generation_config.presence_penalty = model.generation_config.frequency_penalty = None
    rows = lookup_rows(model)
    inputs = batch(rows)
    options = dict(do_sample=sampled, max_new_tokens=40, temperature=0.4, top_k=0) | settings
    with accelerated(model, seed=21):
        kept = dict(return_dict_in_generate=True, output_scores=True)
        out = model.generate(**inputs, **options, **kept)
        expected = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    future = future_of(rows, expected)
    use_drafter(monkeypatch, lambda b, text: branches(future(b, text)[: 3 + b]))
    monkeypatch.delattr("specdec_kernels.hf.generate.WalkVerifier")
    with accelerated(model, seed=21, num_speculative_tokens=8) as metrics:
        assert new_tokens(model, inputs, **options) == expected
    assert metrics.acceptance_rate > 0.4


def branches(true):
    """The right tokens behind a wrong sibling, and a wrong one at their end."""
    return [[wrong(true[0]), *true[1:2]], [*true[:-1], wrong(true[-1])]] if true else []


def test_some_rows_with_a_seed(larger):
    """A10: seeded rows equal their solo runs, the others follow torch's generator."""
    rows = [*lookup_rows(larger), random_rows((7,))[0]]
    options = dict(do_sample=True, max_new_tokens=24, temperature=0.7, top_k=0)
    solo = {}
    for b, seed in ((0, 5), (2, 6)):
        with accelerated(larger, seed=(seed,)):
            solo[b] = new_tokens(larger, batch([rows[b]]), **options)[0]
    texts = []
    with accelerated(larger, seed=(5, None, 6, None), num_speculative_tokens=6):
        for manual in (1, 1, 2):
            torch.manual_seed(manual)
            texts.append(new_tokens(larger, batch(rows), **options))
    for text in texts:
        assert [text[0], text[2]] == [solo[0], solo[2]]
    assert texts[0] == texts[1]
    assert all(texts[0][b] != texts[2][b] for b in (1, 3))


def test_which_random_numbers_seeds_take(larger):
    """One randint per call, of as many as there are rows without a seed, in their order."""
    rows = lookup_rows(larger)
    options = dict(do_sample=True, max_new_tokens=12, temperature=1.2, top_k=0)
    for given in ((None, None, None), (None, 9, None), (8, 9, None)):
        torch.manual_seed(3)
        missing = torch.randint(2**62, (given.count(None),)).tolist()
        state = torch.get_rng_state()
        seeds = [missing.pop(0) if s is None else s for s in given]
        torch.manual_seed(3)
        with accelerated(larger, seed=None if not any(given) else given):
            drawn = new_tokens(larger, batch(rows), **options)
        assert torch.equal(torch.get_rng_state(), state)
        with accelerated(larger, seed=seeds):
            assert new_tokens(larger, batch(rows), **options) == drawn
            assert torch.equal(torch.get_rng_state(), state)  # nothing was left to draw
    with accelerated(larger):
        new_tokens(larger, batch(rows), max_new_tokens=4)
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_in_the_generation_config(larger):
    """They win over patch's; an argument of generate once the attribute exists."""
    model, inputs = fresh("phi3"), batch(lookup_rows(larger))
    options = dict(do_sample=True, max_new_tokens=12, temperature=1.2, top_k=0)

    def text(seed):
        with accelerated(larger, seed=seed):
            return new_tokens(larger, inputs, **options)

    with accelerated(model, seed=1):
        assert new_tokens(model, inputs, **options) == text(1)
        with pytest.raises(ValueError, match="seed"):
            new_tokens(model, inputs, seed=2, **options)
        model.generation_config.seed = (4, 5, 6)
        assert new_tokens(model, inputs, **options) == text((4, 5, 6))
        assert new_tokens(model, inputs, seed=2, **options) == text(2)
        own = type(model.generation_config)(pad_token_id=0, seed=[7, 8, 9], **options)
        out = model.generate(**inputs, generation_config=own)
        assert out[:, inputs["input_ids"].shape[1] :].tolist() == text((7, 8, 9))
        with pytest.raises(ValueError, match=r"one per row \(3\), got 2"):
            new_tokens(model, inputs, seed=(1, 2), **options)
        with pytest.raises(TypeError, match="expected an integer, one per row or None"):
            new_tokens(model, inputs, seed="x", **options)
        assert new_tokens(model, inputs, max_new_tokens=4) == new_tokens(
            larger, inputs, max_new_tokens=4
        )


def test_seeds_that_are_refused():
    for seed, error in ((True, TypeError), ("12", TypeError), ([1, 2.5], TypeError)):
        with pytest.raises(error, match="seed: expected"):
            sdk.SpeculativeConfig(seed=seed)
    with pytest.raises(ValueError, match="64-bit"):
        sdk.SpeculativeConfig(seed=2**63)
    assert sdk.SpeculativeConfig(seed=torch.tensor([3, 4])).seed == (3, 4)


def test_the_last_seed_wraps_around(larger):
    inputs = batch(lookup_rows(larger)[:2])
    options = dict(do_sample=True, max_new_tokens=6, temperature=1.2)
    with accelerated(larger, seed=2**63 - 1):
        text = new_tokens(larger, inputs, **options)
    with accelerated(larger, seed=(2**63 - 1, -(2**63))):
        assert new_tokens(larger, inputs, **options) == text


def test_torch_seeds_govern(larger):
    inputs = batch(lookup_rows(larger))
    options = dict(do_sample=True, temperature=1.5)
    outs = []
    with accelerated(larger):
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            outs.append([new_tokens(larger, inputs, **options) for _ in range(2)])
    assert outs[0] == outs[1] != outs[2]
    assert outs[0][0] != outs[0][1]  # the next call goes on
    with accelerated(larger, seed=7):
        outs = [new_tokens(larger, inputs, **options) for _ in range(2)]
    assert outs[0] == outs[1]
    with accelerated(larger, seed=(7, 8, 9)):
        assert new_tokens(larger, inputs, **options) == outs[0]


def test_edges_of_seeded_settings(larger):
    """A08, A25: more tokens asked for than there are, one kept, none below the largest."""
    inputs = batch(lookup_rows(larger))
    greedy = new_tokens(larger, inputs)
    with accelerated(larger, num_speculative_tokens=8):
        for settings in (dict(top_k=1), dict(top_p=1e-6), dict(min_p=1.0), dict(temperature=1e-6)):
            options = dict(do_sample=True, **{"top_k": 0, **settings})
            assert new_tokens(larger, inputs, **options) == greedy
        out = new_tokens(larger, inputs, do_sample=True, top_k=500, temperature=50.0)
        banned = {(t,): -1000.0 for t in range(2, 90)}
        few = new_tokens(larger, inputs, do_sample=True, top_k=0, sequence_bias=banned)
        never = new_tokens(
            larger, inputs, do_sample=True, top_k=0, sequence_bias={(greedy[0][0],): -100.0}
        )
    assert greedy[0][0] not in {t for row in never for t in row}
    assert all(0 <= t < 96 for row in out for t in row) and len(set(out[0])) > 20
    assert {t for row in few for t in row} <= {0, 1, *range(90, 96)}
