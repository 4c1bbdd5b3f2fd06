"""rng="torch": the same torch.manual_seed gives the text of plain generate, call after call."""

import functools

import pytest
import torch
from tiny import (
    accelerated,
    batch,
    fresh,
    future_of,
    lookup_rows,
    new_tokens,
    use_drafter,
    wrong,
)
from transformers import LogitsProcessor

import specdec_kernels as sdk

CALLS, NEW = 3, 20
FAMILIES = ["llama", "gpt2", "gemma2", "qwen3_moe"]
SETTINGS = {
    "plain": dict(temperature=1.0, top_k=0),
    "warped": dict(temperature=0.4, top_k=30, top_p=0.95),
    "walk": dict(temperature=0.5, top_k=0, typical_p=0.9, repetition_penalty=1.1),
}


@functools.cache
def model_and_prompt(name):
    model = fresh(name)
    return model, lookup_rows(model)[:1]


@functools.cache
def plain(name, setting):
    """The texts of several calls in a row, and where they leave the generator."""
    model, prompt = model_and_prompt(name)
    torch.manual_seed(11)
    options = dict(do_sample=True, max_new_tokens=NEW, **SETTINGS[setting])
    texts = [new_tokens(model, batch(prompt), **options) for _ in range(CALLS)]
    return texts, torch.get_rng_state()


@pytest.mark.parametrize("drafts", ["lookup", "scripted"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_seed_gives_the_text_of_plain(name, setting, drafts, monkeypatch):
    model, prompt = model_and_prompt(name)
    texts, state = plain(name, setting)
    assert len({tuple(t[0]) for t in texts}) == CALLS
    options = dict(do_sample=True, max_new_tokens=NEW, **SETTINGS[setting])
    torch.manual_seed(11)
    with accelerated(model, rng="torch", num_speculative_tokens=6) as metrics:
        for expected in texts:
            if drafts == "scripted":
                future = future_of(prompt, expected)
                use_drafter(monkeypatch, functools.partial(branches, future))
            assert new_tokens(model, batch(prompt), **options) == expected
    assert torch.equal(torch.get_rng_state(), state)
    if drafts == "scripted":
        assert 0.4 < metrics.acceptance_rate < 1.0
    else:
        assert metrics.num_drafts > 0


def branches(future, b, text):
    """Trees: a wrong sibling before the right one, a chain that goes wrong, sometimes nothing."""
    true = future(b, text)[:4]
    if len(text) % 4 == 0 or not true:
        return []
    return [[wrong(true[0]), *true[1:2]], [*true[:3], *map(wrong, true[3:])]]


def test_the_adaptive_size_and_stops(monkeypatch):
    """An EOS in the middle of a block leaves the generator where plain does."""
    model, prompt = model_and_prompt("llama")
    options = dict(do_sample=True, max_new_tokens=NEW, temperature=0.8, top_k=0)
    torch.manual_seed(5)
    text = new_tokens(model, batch(prompt), **options)[0]
    options["eos_token_id"] = text[9]
    torch.manual_seed(5)
    expected, state = new_tokens(model, batch(prompt), **options), torch.get_rng_state()
    assert expected == [text[: text.index(text[9]) + 1]]
    for size in (1, 8, None):
        torch.manual_seed(5)
        with accelerated(model, rng="torch", num_speculative_tokens=size):
            assert new_tokens(model, batch(prompt), **options) == expected
        assert torch.equal(torch.get_rng_state(), state)
    use_drafter(monkeypatch, lambda b, text: [future_of(prompt, expected)(b, text)[:6]])
    torch.manual_seed(5)
    with accelerated(model, rng="torch", num_speculative_tokens=6) as metrics:
        assert new_tokens(model, batch(prompt), **options) == expected
    assert metrics.acceptance_rate == 1.0 and torch.equal(torch.get_rng_state(), state)


class Noisy(LogitsProcessor):
    """Counts its calls and draws from torch's generator."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + torch.rand(scores.shape[-1]) * (self.calls % 3)


def test_processors_that_draw_themselves():
    model, prompt = model_and_prompt("llama")
    options = dict(do_sample=True, max_new_tokens=NEW, temperature=0.4, top_k=0)
    torch.manual_seed(6)
    expected = new_tokens(model, batch(prompt), logits_processor=[Noisy()], **options)
    torch.manual_seed(6)
    with accelerated(model, rng="torch", num_speculative_tokens=6):
        assert new_tokens(model, batch(prompt), logits_processor=[Noisy()], **options) == expected


def test_several_rows_run_plain():
    model, _ = model_and_prompt("llama")
    inputs = batch(lookup_rows(model))
    options = dict(do_sample=True, max_new_tokens=8, temperature=0.7)
    torch.manual_seed(7)
    expected = new_tokens(model, inputs, **options)
    sdk.patch(model, rng="torch")
    torch.manual_seed(7)
    with pytest.warns(UserWarning, match="plain decoding: rng='torch' with more than one row"):
        assert new_tokens(model, inputs, **options) == expected
    sdk.unpatch(model)
    expected = new_tokens(model, inputs, max_new_tokens=8)
    with accelerated(model, rng="torch") as metrics:  # greedy needs no random numbers
        assert new_tokens(model, inputs, max_new_tokens=8) == expected
    assert metrics.num_new_tokens == 24


def test_a_model_that_turns_out_to_be_unsupported_loses_no_random_numbers(monkeypatch):
    """The first token was drawn before the verify forward refused; plain starts over."""
    model = fresh("llama")
    _, prompt = model_and_prompt("llama")
    options = dict(do_sample=True, max_new_tokens=8, temperature=0.7)
    torch.manual_seed(8)
    expected = new_tokens(model, batch(prompt), **options)
    monkeypatch.setattr("specdec_kernels.hf.attention.HARMLESS", frozenset())
    for rng in ("torch", "philox"):
        sdk.patch(model, rng=rng)
        torch.manual_seed(8)
        with pytest.warns(UserWarning, match="to its attention"):
            assert new_tokens(model, batch(prompt), **options) == expected
        sdk.unpatch(model)


def test_a_seed_of_ours_contradicts_it():
    model, prompt = model_and_prompt("llama")
    with pytest.raises(ValueError, match="expected none with rng='torch'"):
        sdk.patch(model, rng="torch", seed=3)
    with pytest.raises(ValueError, match=r"auto or coupled with rng='torch', got 'block'"):
        sdk.patch(model, rng="torch", rule="block")
    model = fresh("llama")
    model.generation_config.seed = 3
    with (
        accelerated(model, rng="torch"),
        pytest.raises(ValueError, match="expected none with rng='torch', got 3"),
    ):
        new_tokens(model, batch(prompt), do_sample=True)
