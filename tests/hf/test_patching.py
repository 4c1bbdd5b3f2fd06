"""patch, unpatch, patched, support, metrics: what they accept, refuse, change and leave alone."""

import copy
import gc
import pickle
import sys
import warnings
import weakref

import pytest
import torch
from tiny import accelerated, batch, fresh, lookup_rows, new_tokens, random_rows, tiny
from transformers import (
    AutoModelForCausalLM,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

import specdec_kernels as sdk

METHODS = ("_sample", "_beam_search", "_assisted_decoding")
ORIGINAL = {name: GenerationMixin.__dict__[name] for name in METHODS}


def is_original():
    return all(GenerationMixin.__dict__[name] is ORIGINAL[name] for name in METHODS)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    assert is_original()
    yield
    assert is_original()


@pytest.fixture(scope="module")
def inputs():
    return batch(lookup_rows(tiny("llama")))


def is_patched(model):
    try:
        sdk.metrics(model)
    except ValueError:
        return False
    return True


def test_unpatch_restores_everything(inputs):
    """D10: patching twice is one patch, and generate is the function it was."""
    model, other = fresh("llama"), fresh("gpt2")
    generate = model.generate.__func__
    attributes = set(vars(model))
    assert sdk.patch(model) is model
    assert sdk.patch(model, num_speculative_tokens=2) is model
    sdk.patch(other)
    assert not is_original() and model.generate.__func__ is generate
    assert sdk.unpatch(model) is model
    assert not is_patched(model) and is_patched(other)
    assert new_tokens(model, inputs, max_new_tokens=4)
    sdk.unpatch(other)
    sdk.unpatch(model)  # a model that is not patched is left alone
    assert is_original() and model.generate.__func__ is generate
    assert set(vars(model)) == attributes


def test_patching_again_replaces_the_settings(inputs):
    model = fresh("llama")
    sdk.patch(model, method="none")
    expected = new_tokens(model, inputs)
    assert sdk.metrics(model).num_drafts == 0 and sdk.metrics(model).num_steps == 47
    sdk.patch(model, num_speculative_tokens=4)
    assert new_tokens(model, inputs) == expected
    assert sdk.metrics(model).num_drafts > 0
    sdk.metrics(model).reset()
    assert sdk.metrics(model).num_steps == 0
    sdk.unpatch(model)


def test_nested_contexts_restore_the_outer_settings(inputs):
    model = fresh("llama")
    with sdk.patched(model, method="none") as same:
        assert same is model
        outer = sdk.metrics(model)
        with sdk.patched(model, {"num_speculative_tokens": 4}):
            assert sdk.metrics(model) is not outer
        assert sdk.metrics(model) is outer
        with pytest.raises(KeyError), sdk.patched(model):
            raise KeyError
        assert sdk.metrics(model) is outer
    assert not is_patched(model)


def test_every_way_to_give_settings():
    config = sdk.SpeculativeConfig(num_speculative_tokens=3)
    model = fresh("llama")
    for given in (config, {"num_speculative_tokens": 3}, {"method": "ngram"}, None):
        with sdk.patched(model, given, prompt_lookup_max=5):
            assert is_patched(model)


def test_vllm_options_without_effect_are_named_where_patch_is_called():
    model, given = fresh("llama"), {"method": "ngram", "moe_backend": "x", "enforce_eager": None}
    with pytest.warns(UserWarning, match="no effect here: moe_backend='x'") as caught:
        sdk.patch(model, given)
        with sdk.patched(model, given):
            pass
    assert [w.filename for w in caught] == [__file__, __file__]
    sdk.unpatch(model)


BAD = [
    (dict(method="eagel"), ValueError, "method: expected one of .*ngram.*, got 'eagel'"),
    (dict(num_speculative_tokens=0), ValueError, "num_speculative_tokens: expected at least 1"),
    (dict(num_speculative_tokens=-3), ValueError, "num_speculative_tokens.*got -3"),
    (dict(num_speculative_tokens="5"), TypeError, "num_speculative_tokens: expected an integer"),
    (dict(num_speculative_tokens=2.0), TypeError, "num_speculative_tokens.*got 2.0"),
    (dict(num_speculative_tokens=True), TypeError, "num_speculative_tokens"),
    (dict(max_speculative_tokens=None), TypeError, "max_speculative_tokens"),
    (dict(num_speculativ_tokens=5), ValueError, "nearest known one is 'num_speculative_tokens'"),
    (dict(prompt_lookup_min=4, prompt_lookup_max=2), ValueError, "prompt_lookup_min.*got 4"),
    (dict(linear="fast"), ValueError, "linear: expected one of"),
    (dict(seed="x"), (TypeError, ValueError), "seed|integer"),
    (dict(config=7), TypeError, "expected config as a dict or SpeculativeConfig, got int"),
]


@pytest.mark.parametrize("options, error, message", BAD, ids=str)
def test_bad_settings_change_nothing(options, error, message):
    model = fresh("llama")
    with pytest.raises(error, match=message):
        sdk.patch(model, **options)
    assert not is_patched(model) and is_original()
    with sdk.patched(model, num_speculative_tokens=2):
        before = sdk.metrics(model)
        with pytest.raises(error), sdk.patched(model, **options):
            pass
        assert sdk.metrics(model) is before


@pytest.mark.parametrize("thing", ["llama", None, torch.nn.Linear(2, 2), dict()])
def test_not_a_model(thing):
    for function in (sdk.patch, sdk.unpatch, sdk.metrics):
        with pytest.raises(TypeError, match="expected a transformers model, got"):
            function(thing)
    assert not sdk.support(thing).ok


def test_a_patch_that_fails_half_way(monkeypatch, inputs):
    model = fresh("llama")
    expected = new_tokens(model, inputs)

    def fails(*args, **options):
        raise RuntimeError("half-way")

    for place in ("Runner", "_install", "support"):
        with monkeypatch.context() as patches:
            patches.setattr(sys.modules["specdec_kernels.hf.patch"], place, fails)
            with pytest.raises(RuntimeError, match="half-way"):
                sdk.patch(model)
        assert not is_patched(model) and is_original()
    assert new_tokens(model, inputs) == expected


def test_metrics_of_an_unpatched_model():
    with pytest.raises(ValueError, match="expected a patched model"):
        sdk.metrics(tiny("llama"))


def test_seeds_of_the_wrong_number(inputs):
    model = fresh("llama")
    with sdk.patched(model, seed=(1, 2)), pytest.raises(ValueError, match=r"one per row \(3\)"):
        new_tokens(model, inputs, do_sample=True)


def test_a_model_without_a_head_is_refused():
    model = LlamaModel(copy.deepcopy(tiny("llama").config))
    assert "language model" in sdk.support(model).reason


def test_a_decoding_loop_of_the_models_own():
    class Own(LlamaForCausalLM):
        def _sample(self, input_ids, **options):
            return input_ids

    model = Own(copy.deepcopy(tiny("llama").config))
    assert "decoding loop of its own" in sdk.support(model).reason
    with pytest.warns(UserWarning, match="decoding loop of its own"):
        sdk.patch(model)
    sdk.unpatch(model)


def test_copies_and_files_are_plain(inputs, tmp_path):
    """D10: nothing of ours travels with the model."""
    model = fresh("llama")
    expected = new_tokens(model, inputs)
    with accelerated(model):
        new_tokens(model, inputs, max_new_tokens=6)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        model.save_pretrained(tmp_path)
    copies.append(AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    assert "specdec" not in (tmp_path / "config.json").read_text()
    for other in copies:
        assert not is_patched(other)
        assert other.config._attn_implementation == "sdpa"
        assert new_tokens(other, inputs) == expected


def test_patching_keeps_no_model_alive(inputs):
    model = fresh("llama")
    sdk.patch(model)
    new_tokens(model, inputs, max_new_tokens=8)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    sdk.unpatch(tiny("llama"))  # the hooks go with the next unpatch


class Wrapper(torch.nn.Module):
    """What a PEFT model looks like from outside."""

    def __init__(self, model):
        super().__init__()
        self.base = model

    def get_base_model(self):
        return self.base

    def generate(self, **options):
        return self.base.generate(**options)


class LowRank(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        torch.manual_seed(1)
        self.down = torch.nn.Linear(base.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("before", [False, True])
def test_adapters(before, inputs):
    """D11: a wrapper with low-rank layers, put on before and after patch."""
    model = fresh("llama")
    wrapper = Wrapper(model)
    if before:
        sdk.patch(model)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.mlp.up_proj = LowRank(layer.mlp.up_proj)
    expected = new_tokens(copy.deepcopy(model), inputs)
    assert sdk.support(wrapper).ok
    if not before:
        assert sdk.patch(wrapper) is wrapper
    assert new_tokens(wrapper, inputs) == expected
    assert sdk.metrics(wrapper).num_accepted_tokens > 0
    sdk.unpatch(wrapper)
    assert not is_patched(model)


def test_one_warning_per_reason(inputs):
    model = fresh("llama")
    sdk.patch(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            new_tokens(model, inputs, num_beams=2, max_new_tokens=3)
            new_tokens(model, inputs, use_cache=False, max_new_tokens=3)
            new_tokens(model, inputs, max_new_tokens=3)
    ours = [str(w.message) for w in caught if "specdec_kernels" in str(w.message)]
    assert len(ours) == 2 and "beam" in ours[0] and "use_cache" in ours[1]
    places = [w.filename for w in caught if "specdec_kernels" in str(w.message)]
    assert places == [new_tokens.__code__.co_filename] * 2  # where generate was called
    sdk.unpatch(model)


def test_the_attention_implementation_may_change_while_patched(inputs):
    model = fresh("llama")
    expected = new_tokens(model, inputs)
    with accelerated(model):
        new_tokens(model, inputs, max_new_tokens=4)
        model.set_attn_implementation("eager")
        assert new_tokens(model, inputs) == expected
        assert model.config._attn_implementation == "eager"


def test_models_that_share_a_config(inputs):
    config = LlamaConfig(**{**tiny("llama").config.to_dict(), "architectures": None})
    torch.manual_seed(0)
    models = [LlamaForCausalLM(config).eval() for _ in range(2)]
    expected = [new_tokens(m, inputs, max_new_tokens=12) for m in models]
    with accelerated(models[0]), accelerated(models[1]):
        for _ in range(2):
            assert [new_tokens(m, inputs, max_new_tokens=12) for m in models] == expected
    assert config._attn_implementation == "sdpa"


def test_weights_may_change_while_patched(inputs):
    """Training goes on between two calls of generate."""
    model = fresh("llama")
    with accelerated(model):
        first = new_tokens(model, inputs)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.3)
        changed = new_tokens(copy.deepcopy(model), inputs)
        assert new_tokens(model, inputs) == changed != first
        model.lm_head = torch.nn.Linear(32, 96)
        replaced = new_tokens(copy.deepcopy(model), inputs)
        assert new_tokens(model, inputs) == replaced


def test_metrics_add_up():
    """D13."""
    model = fresh("llama")
    prompts = batch(random_rows((4, 8)))
    with accelerated(model, method="none") as metrics:
        new_tokens(model, prompts, max_new_tokens=5)
        assert (metrics.num_new_tokens, metrics.num_steps, metrics.num_row_steps) == (10, 4, 8)
        assert metrics.acceptance_rate == 0.0 and metrics.mean_acceptance_length == 1.0
        assert metrics.accepted_per_position == []
        assert metrics.snapshot()["num_new_tokens"] == 10
