"""Which draft models are taken, what is said of others, and that nothing of them stays behind."""

import importlib
import warnings
import weakref

import pytest
import torch
from test_draft_model import noisy
from test_threads import together
from tiny import accelerated, batch, char_tokenizer, fresh, new_tokens, random_rows, tiny
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

import specdec_kernels as sdk
from specdec_kernels.drafting.intersection import Intersection

engines = importlib.import_module("specdec_kernels.hf.patch")._engines


@pytest.fixture(scope="module")
def inputs():
    return batch(random_rows((3, 9, 14), seed=1))


@pytest.fixture(scope="module")
def target():
    return fresh("llama")


@pytest.fixture
def saved(tmp_path):
    """Saves models with their tokenizers, and loads them as users do."""

    def save(model, name, tokenizer=None):
        model.save_pretrained(tmp_path / name)
        if tokenizer is not None:
            tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


def test_from_a_folder(target, inputs, saved):
    """vLLM's JSON as it is: the method follows from the model; the dtype is the target's."""
    folder = saved(fresh("qwen3").to(torch.bfloat16), "draft")
    expected = new_tokens(target, inputs)
    for source in (folder, str(folder)):
        with sdk.patched(target, {"model": source, "num_speculative_tokens": 3}):
            assert new_tokens(target, inputs) == expected
            assert sdk.metrics(target).num_draft_tokens > 0
            assert engines[target].draft.model.dtype == target.dtype == torch.float32


def test_another_dtype(target, inputs):
    """A loaded model is used as it is."""
    draft = fresh("llama").to(torch.bfloat16)
    expected = new_tokens(target, inputs)
    for options in ({}, dict(draft_tree_topk=2)):
        with accelerated(target, model=draft, num_speculative_tokens=3, **options) as metrics:
            assert new_tokens(target, inputs) == expected
        assert metrics.num_accepted_tokens > 0
    assert draft.dtype == torch.bfloat16


def other_tokenizer():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, **{chr(31 + i): 96 - i for i in range(1, 96)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


def test_c18_tokenizers_are_compared(inputs, saved):
    """Where they lie with the models: the same one with other padding, and another."""
    target = AutoModelForCausalLM.from_pretrained(saved(tiny("llama"), "t", char_tokenizer()))
    same = saved(fresh("llama", vocab_size=400), "same", char_tokenizer())
    with accelerated(target, model=same):
        assert engines[target].draft.translation is None
        assert new_tokens(target, inputs) == new_tokens(tiny("llama"), inputs)
    other = saved(fresh("llama"), "other", other_tokenizer())
    with accelerated(target, model=other, num_speculative_tokens=2):
        assert isinstance(engines[target].draft.translation, Intersection)
        assert new_tokens(target, inputs) == new_tokens(tiny("llama"), inputs)


def test_c18_sizes_decide_where_no_tokenizers_are(target):
    with pytest.raises(
        ValueError, match=r"tokenizer: expected one, .* target; the draft model has 300 tokens"
    ):
        sdk.patch(target, model=fresh("llama", vocab_size=300))


class Wrapped:
    def __init__(self, model):
        self.model = model

    def get_base_model(self):
        return self.model


def test_a_wrapped_model(target, inputs):
    with accelerated(target, model=Wrapped(fresh("llama")), num_speculative_tokens=4) as metrics:
        assert new_tokens(target, inputs) == new_tokens(tiny("llama"), inputs)
    assert metrics.acceptance_rate == 1


def recurrent():
    config = CONFIG_MAPPING["mamba"](vocab_size=96, hidden_size=16, num_hidden_layers=1)
    return AutoModelForCausalLM.from_config(config).eval()


def with_nan():
    model = fresh("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("nan")
    return model


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(method="draft_model"), ValueError, "model: expected a draft model .* got None"),
        (dict(method="ngram", model="x"), ValueError, "model: .* got one with method 'ngram'"),
        (dict(model=3), TypeError, "folder, a Hub id or a transformers model, got int"),
        (dict(model="/no/such"), ValueError, "model: expected the folder or Hub id .*'/no/such'"),
        (dict(model=recurrent), ValueError, "MambaForCausalLM cannot draft: .*"),
        (dict(model=with_nan), ValueError, r"without NaN, got some in .*layers.1.mlp.up_proj"),
        (dict(model=lambda: fresh("llama").train()), ValueError, "evaluation mode"),
        (dict(model="x", draft_tree_topk=0), ValueError, "draft_tree_topk: expected at least 1"),
        (dict(model="x", draft_min_tokens=-1), ValueError, "draft_min_tokens: expected at least 0"),
        (dict(model="x", draft_min_tokens=60), ValueError, "expected at most the 48 tokens"),
        (dict(model="x", draft_p_min=1.5), ValueError, "draft_p_min: expected a number from 0 to"),
        (dict(model="x", draft_sample_method="random"), ValueError, "one of greedy, probabilistic"),
        (dict(model="x", draft_sample_methods="greedy"), ValueError, "unknown option"),
        (
            dict(model="x", draft_sample_method="probabilistic", draft_tree_topk=2),
            ValueError,
            "draft_sample_method: expected greedy with draft_tree_topk above 1",
        ),
        (
            dict(model="x", rule="block", draft_tree_topk=2),
            ValueError,
            "expected 1 with rule 'block'",
        ),
    ],
)
def test_what_is_refused(options, error, message, inputs):
    target = fresh("llama")
    source = options.get("model")
    if callable(source) and not isinstance(source, PreTrainedModel):
        options = {**options, "model": source()}
    with pytest.raises(error, match=message):
        sdk.patch(target, **options)
    with pytest.raises(ValueError, match="expected a patched model"):
        sdk.metrics(target)


def test_a_model_does_not_draft_for_itself(target):
    with pytest.raises(ValueError, match="another model than the one that it drafts for"):
        sdk.patch(target, model=target)


def test_an_unsupported_target_loads_no_draft_model():
    with pytest.warns(UserWarning, match="plain decoding"):
        sdk.patch(recurrent(), model="/no/such")


def test_unpatching_frees_the_draft_model(inputs):
    """Nothing refers to it, and nothing is stored on either model or its config."""
    target, draft = fresh("llama"), fresh("llama")
    expected = new_tokens(target, inputs)
    before = [set(vars(x)) for x in (target, target.config, draft, draft.config)]
    sdk.patch(target, model=draft, num_speculative_tokens=3)
    assert new_tokens(target, inputs) == expected
    assert [set(vars(x)) for x in (target, target.config, draft, draft.config)] == before
    assert draft.config._attn_implementation == "sdpa"
    assert not any("forward" in vars(module) for module in draft.modules())
    gone = weakref.ref(draft)
    del draft
    assert gone() is not None
    sdk.unpatch(target)
    assert gone() is None


def test_a_config_may_be_used_again(target, inputs):
    """With the very model, not a copy of it."""
    config = sdk.SpeculativeConfig(method="draft_model", model=fresh("llama"))
    assert sdk.SpeculativeConfig.make(config, num_speculative_tokens=2).model is config.model
    assert "Llama" not in repr(config)
    for size in (2, 5):
        with sdk.patched(target, config, num_speculative_tokens=size):
            assert new_tokens(target, inputs) == new_tokens(tiny("llama"), inputs)
            assert sdk.metrics(target).acceptance_rate == 1


def test_threads(inputs):
    """One draft model in two runs at once, while a third thread uses it by itself."""
    target, draft = fresh("llama"), noisy(tiny("llama"), 0.05)
    one = batch(random_rows((9,), seed=2))
    expected = [new_tokens(target, one), new_tokens(target, inputs), new_tokens(draft, one)]
    with accelerated(target, model=draft, num_speculative_tokens=4):
        results = together(
            lambda: new_tokens(target, one),
            lambda: new_tokens(target, inputs),
            lambda: new_tokens(draft, one),
        )
    assert results == [[e] * 3 for e in expected]
    assert draft.config._attn_implementation == "sdpa"


def test_a_draft_model_that_is_patched_itself(inputs):
    target, draft = fresh("llama"), noisy(tiny("llama"), 0.05)
    expected = new_tokens(target, inputs), new_tokens(draft, inputs)
    with accelerated(draft, num_speculative_tokens=3), accelerated(target, model=draft):
        assert (new_tokens(target, inputs), new_tokens(draft, inputs)) == expected


@pytest.mark.parametrize("linear", ["auto", "off", "invariant"])
def test_linear_modes(linear, inputs):
    """In 16 bits "invariant" gives the tokens of method "none"."""
    target, draft = fresh("llama").to(torch.bfloat16), noisy(tiny("llama"), 0.02)
    with accelerated(target, method="none", linear=linear):
        expected = new_tokens(target, inputs)
    with accelerated(target, model=draft, linear=linear, num_speculative_tokens=4) as metrics:
        text = new_tokens(target, inputs)
    assert metrics.num_accepted_tokens > 0
    assert linear != "invariant" or text == expected


def test_adaptive_drafting_stops_when_it_does_not_pay(inputs):
    """E01: a draft model as dear as its target is left alone but for probes."""
    target = fresh("llama")
    with accelerated(target, model=fresh("qwen3")) as metrics:
        new_tokens(target, inputs, max_new_tokens=200)
    assert 0 < metrics.num_draft_tokens < 0.2 * metrics.num_row_steps


def test_short_and_unlikely_drafts_are_not_used(target, inputs):
    expected = new_tokens(target, inputs)
    draft = noisy(target, 0.05)
    draft.lm_head.weight.data.mul_(8)  # surer of the same tokens
    counts = []
    for options in ({}, dict(draft_p_min=0.5), dict(draft_p_min=0.5, draft_min_tokens=3)):
        for topk in (1, 2):
            with accelerated(
                target, model=draft, num_speculative_tokens=4, draft_tree_topk=topk, **options
            ) as metrics:
                assert new_tokens(target, inputs) == expected
            counts.append(metrics.num_drafts)
    assert counts[0] > counts[2] > counts[4] > 0 and counts[1] > counts[3] > counts[5]


def test_no_warnings(target, inputs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with sdk.patched(target, model=fresh("llama"), num_speculative_tokens=2):
            new_tokens(target, inputs)


def test_a_truncated_file_is_refused(tmp_path):
    target = fresh("llama")
    target.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model: expected readable weights in"):
        sdk.patch(target, method="draft_model", model=tmp_path)
    with pytest.raises(ValueError, match="patched model"):
        sdk.metrics(target)
