"""Token equality with plain generate, family by family, and the models that must be refused."""

import warnings

import pytest
import torch
from tiny import (
    FAMILIES,
    accelerated,
    batch,
    fresh,
    future_of,
    has_family,
    lookup_rows,
    new_tokens,
    random_rows,
    tiny,
    use_drafter,
    wrong,
)
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import specdec_kernels as sdk

ALL = [
    pytest.param(name, marks=() if has_family(name) else pytest.mark.skip("not in this version"))
    for name in FAMILIES
]


@pytest.mark.parametrize("name", ALL)
def test_lookup_equals_plain(name):
    """Three ragged left-padded rows whose prompts hold matches that hold and matches that fail."""
    model = fresh(name)
    inputs = batch(lookup_rows(model))
    expected = new_tokens(model, inputs)
    for options in ({"num_speculative_tokens": 8}, {}):
        with accelerated(model, **options) as metrics:
            assert new_tokens(model, inputs) == expected
        assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens
        assert metrics.num_new_tokens == 3 * 48


def branching(future):
    """Trees whose true path lies behind a wrong sibling at two levels and then goes wrong."""

    def plan(b, text):
        f = future(b, text)
        true = [f[: n + 1] for n in range(3) if len(f) > n + 1]
        if not true:
            return []
        chains = [[wrong(f[0]), *f[1:3]], [f[0], wrong(f[1])]]
        return [*chains, [*f[:3], wrong(f[3])] if len(f) > 3 else f[:1]]

    return plan


@pytest.mark.parametrize("name", ALL)
def test_forced_rejections_in_trees(name, monkeypatch):
    model = fresh(name)
    prompts = random_rows((3, 17, 30), seed=1)
    inputs = batch(prompts)
    expected = new_tokens(model, inputs)
    drafter = use_drafter(monkeypatch, branching(future_of(prompts, expected)))
    with accelerated(model, num_speculative_tokens=8) as metrics:
        assert new_tokens(model, inputs) == expected
    assert metrics.accepted_per_position == [33, 33, 30]  # every step but the last, shorter ones
    assert drafter.sizes[:9] == [[4, 4, 4]] * 9


def mutant_attention(**changes):
    """tree_attention with some of its arguments changed; a function gets the old value."""
    from specdec_kernels.ops import tree_attention

    def mutant(q, k, v, prefix_len, num_nodes, tree_mask, depth, **options):
        given = {"tree_mask": tree_mask, "depth": depth, **options}
        for key, change in changes.items():
            if given[key] is not None:
                given[key] = change(given[key]) if callable(change) else change
        return tree_attention(q, k, v, prefix_len, num_nodes, **given)

    return mutant


@pytest.mark.parametrize(
    "name, changes",
    [
        ("mistral", {"window": lambda w: w + 1}),
        ("mistral", {"window": lambda w: w - 1}),
        ("gemma3_text", {"window": None}),
        ("mistral", {"depth": torch.zeros_like}),
        ("gemma2", {"softcap": None}),
        ("gpt_oss", {"sinks": None}),
        ("llama", {"tree_mask": None, "depth": None}),
        ("llama", {"scale": lambda s: 1.1 * s}),
    ],
)
def test_a_broken_attention_would_be_seen(name, changes, monkeypatch):
    """The models and prompts above tell right from wrong."""
    assert outputs_of_mutant(name, monkeypatch, "hf.attention.tree_attention", changes)


def outputs_of_mutant(name, monkeypatch, target, changes):
    model = fresh(name)
    prompts = random_rows((3, 17, 30), seed=1)
    inputs = batch(prompts)
    expected = new_tokens(model, inputs)
    use_drafter(monkeypatch, branching(future_of(prompts, expected)))
    mutant = mutant_attention(**changes) if isinstance(changes, dict) else changes
    monkeypatch.setattr(f"specdec_kernels.{target}", mutant)
    with accelerated(model, num_speculative_tokens=8):
        return new_tokens(model, inputs) != expected


def test_a_lost_commit_would_be_seen(monkeypatch):
    assert outputs_of_mutant("llama", monkeypatch, "cache.commit_kv_", lambda *args: None)


SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
STATE = dict(
    conv_kernel=4,
    state_size=4,
    num_heads=4,
    head_dim=16,
    n_groups=1,
    expand=2,
    intermediate_size=64,
)
REFUSED = {
    "llama4_text": dict(
        **SMALL,
        intermediate_size=48,
        intermediate_size_mlp=48,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        attention_chunk_size=16,
    ),
    "mamba": dict(**SMALL, state_size=4, intermediate_size=64),
    "mamba2": dict(**SMALL, **STATE),
    "bamba": dict(
        **SMALL,
        intermediate_size=48,
        num_key_value_heads=2,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=8,
        mamba_n_groups=1,
    ),
    "lfm2": dict(
        **SMALL,
        intermediate_size=48,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
        block_multiple_of=8,
    ),
    "qwen3_next": dict(
        **SMALL,
        intermediate_size=48,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "bloom": dict(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
    "falcon": dict(**SMALL, alibi=True, new_decoder_architecture=False),
    "mpt": dict(vocab_size=64, d_model=32, n_layers=2, n_heads=4),
    "gpt_neo": dict(
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    ),
    "phi3": dict(
        **SMALL,
        intermediate_size=48,
        num_key_value_heads=4,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_models_run_plain(name):
    """B04: state that cannot be rolled back, positions or masks that are the model's own."""
    if name not in CONFIG_MAPPING:
        pytest.skip("not in this version")
    config = CONFIG_MAPPING[name](**REFUSED[name], pad_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    check_refused(AutoModelForCausalLM.from_config(config).eval())


def test_a_sliding_window_that_only_the_mask_knows():
    """Moshi's attention function is not told about the window: seen at the first verify forward."""
    config = CONFIG_MAPPING["moshi"](
        **SMALL,
        num_key_value_heads=4,
        head_dim=8,
        ffn_dim=48,
        sliding_window=12,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(5 if parameter.dim() > 1 else 1)
    inputs = batch(random_rows((20, 30), high=64))
    expected = new_tokens(model, inputs)
    with pytest.warns(UserWarning, match="plain decoding"):
        sdk.patch(model)
        assert new_tokens(model, inputs) == expected
    sdk.unpatch(model)


def test_encoder_decoder_models_are_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    model = T5ForConditionalGeneration(config).eval()
    model.generation_config.decoder_start_token_id = 0
    check_refused(model)


def check_refused(model):
    inputs = {"input_ids": torch.tensor([[3, 4, 5, 6, 3, 4, 5, 6, 3, 4]])}
    options = dict(max_new_tokens=12, do_sample=False)
    expected = model.generate(**inputs, **options)
    answer = sdk.support(model)
    assert not answer.ok and len(answer.reason) > 10
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sdk.patch(model)
        outputs = [model.generate(**inputs, **options) for _ in range(2)]
        sdk.unpatch(model)
    ours = [str(w.message) for w in caught if "specdec_kernels" in str(w.message)]
    assert len(ours) == 1 and answer.reason in ours[0]
    assert all(torch.equal(out, expected) for out in outputs)


def test_supported_models_say_so():
    assert sdk.support(tiny("llama")) == (True, "")
