"""The hidden states that drafters ask for: which ones, in which slots (C16)."""

import threading

import pytest
import torch
from test_families import ALL
from tiny import Scripted, accelerated, batch, fresh, future_of, new_tokens, random_rows, wrong

import specdec_kernels as sdk
from specdec_kernels.hf.attention import UnsupportedModelError
from specdec_kernels.hf.features import BEFORE_NORM, FeatureTap


class Watcher(Scripted):
    """Keeps for every row the features of its committed tokens, in order."""

    def __init__(self, plan, hidden_layers):
        super().__init__(plan)
        self.hidden_layers = hidden_layers

    def begin(self, tokens, lens, features):
        assert features.shape[:2] == (len(lens), int(lens.max()) - 1)
        self.rows = [list(row[: n - 1]) for row, n in zip(features, lens.tolist(), strict=True)]

    def commit(self, decision, features):
        assert features.shape[:2] == decision.path.shape
        for b, (path, kept) in enumerate(zip(decision.path, decision.num_kept, strict=True)):
            self.rows[b].extend(features[b, path[:kept].long()])


def branching(future):
    """The true path stands behind a wrong sibling, so kept slots move."""

    def plan(b, text):
        f = future(b, text)
        return [[wrong(f[0])], f[:2]] if len(f) > 1 else []

    return plan


def check(model, layers, monkeypatch, **options):
    """Every committed token's features are those of a forward of the whole text, row by row."""
    prompts = random_rows((3, 17, 9), seed=1)
    inputs = batch(prompts)
    texts = new_tokens(model, inputs, max_new_tokens=20)
    watcher = Watcher(branching(future_of(prompts, texts)), layers)
    monkeypatch.setattr("specdec_kernels.hf.generate.make_drafter", watcher)
    with accelerated(model, num_speculative_tokens=4, **options) as metrics:
        assert new_tokens(model, inputs, max_new_tokens=20) == texts
    assert metrics.accepted_per_position[1] >= 15
    for prompt, new, got in zip(prompts, texts, watcher.rows, strict=True):
        ids = torch.tensor([(prompt + new)[: len(got)]])
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states
        expected = torch.cat([states[k] for k in layers], 2)[0]
        assert len(got) >= len(prompt) + 19
        torch.testing.assert_close(torch.stack(got), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ALL)
def test_c16_ids_count_as_in_transformers(name, monkeypatch):
    """The embeddings, the boundary between two layers, and the end behind the final norm."""
    check(fresh(name), (2, 0, 1), monkeypatch)


def test_features_of_the_invariant_forward(monkeypatch):
    check(fresh("llama"), (1, 2), monkeypatch, linear="invariant")


def test_no_hook_stays_and_other_threads_are_not_heard(monkeypatch):
    model = fresh("llama")
    tap = FeatureTap(model, (1,))
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad(), tap.caught() as caught:
        model(ids)
        mine = caught[1].clone()
        other = threading.Thread(target=lambda: model(ids + 1))
        other.start()
        other.join()
    assert torch.equal(tap.joined(caught), mine)
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks


def test_ids_that_a_model_does_not_have():
    with pytest.raises(ValueError, match="expected ids from 0 to 2 for LlamaForCausalLM, got 3"):
        FeatureTap(fresh("llama"), (1, 3))


def test_layers_that_stand_nowhere():
    model = fresh("llama")
    model.model.layers = torch.nn.ModuleList([*model.model.layers, *model.model.layers])
    with pytest.raises(UnsupportedModelError, match="does not keep its 2 layers in one list"):
        FeatureTap(model, (1,))


def test_nothing_is_hooked_when_nobody_asks(monkeypatch):
    model = fresh("llama")
    monkeypatch.setattr(torch.nn.Module, "register_forward_hook", None)
    monkeypatch.setattr(torch.nn.Module, "register_forward_pre_hook", None)
    inputs = batch(random_rows((5,)))
    with sdk.patched(model):
        model.generate(**inputs, do_sample=False, max_new_tokens=8)
        assert sdk.metrics(model).num_steps > 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text"])
def test_the_last_state_before_the_final_norm(name):
    model = fresh(name)
    decoder = model.transformer if name == "gpt2" else model.model
    tap = FeatureTap(model, (BEFORE_NORM, 2))
    with torch.no_grad(), tap.caught() as found:
        model(torch.tensor(random_rows((9,), seed=1)))
        norm = decoder.ln_f if name == "gpt2" else decoder.norm
        expected = norm(found[BEFORE_NORM])
    torch.testing.assert_close(found[2], expected)
    assert not torch.allclose(found[BEFORE_NORM], expected, atol=1e-2)
    assert tap.joined(found).shape == (1, 9, 2 * model.config.hidden_size)
