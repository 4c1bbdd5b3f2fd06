"""DFlash drafters on disk: what is found there, and what cannot draft for a target says why."""

import gc
import json
import weakref

import pytest
import torch
from dflash_blocks import block_weights, layer_config, speculators, write, zlab
from eagle_heads import head_weights, safeailab
from tiny import accelerated, batch, fresh, new_tokens, random_rows

import specdec_kernels as sdk
from specdec_kernels import SpeculativeConfig
from specdec_kernels.hf.dflash import load_dflash
from specdec_kernels.hf.eagle import head_method

IDS = (0, 2, 1)


@pytest.fixture(scope="module")
def target():
    return fresh("llama")


@pytest.fixture(scope="module")
def weights(target):
    return block_weights(target, ids=(1, 2, 1))


@pytest.fixture
def source(target, weights, tmp_path):
    return zlab(tmp_path / "drafter", target, weights, (1, 2, 1))


def test_the_method_is_found_in_the_weights(target, weights, source, tmp_path_factory):
    plain = tmp_path_factory.mktemp("plain")  # no name that vLLM would read a method from
    assert head_method(source) == "dflash"
    found = zlab(plain / "z", target, weights, (1, 2, 1))
    assert head_method(speculators(plain / "s", target, weights, IDS)) == "dflash"
    head = safeailab(plain / "e", target, head_weights(target, ids=IDS), IDS)
    assert head_method(head) == "eagle3"
    inputs = batch(random_rows((3, 9), seed=1))
    expected = new_tokens(target, inputs)
    for method in (None, "suffix+draft_model"):
        with accelerated(target, method=method, model=found, num_speculative_tokens=4) as metrics:
            assert new_tokens(target, inputs) == expected
        assert metrics.num_draft_tokens > 0
        assert method is None or "dflash" in metrics.drafters


@pytest.mark.parametrize(
    "read, words",
    [
        (
            SpeculativeConfig.from_vllm,
            '{{"method": "dflash", "model": "{0}", "num_speculative_tokens": 3}}',
        ),
        (
            SpeculativeConfig.from_sglang,
            "--speculative-algorithm DFLASH --speculative-draft-model-path {0} "
            "--speculative-num-draft-tokens 4",
        ),
        (SpeculativeConfig.from_llama_cpp, "--spec-type draft-dflash -md {0}"),
    ],
    ids=["vllm", "sglang", "llama.cpp"],
)
def test_options_of_other_engines(read, words, target, source):
    """Chains of three tokens."""
    config = read(words.format(source))
    assert config.method == "dflash" and config.children_in_draft == 1
    inputs = batch(random_rows((3, 9), seed=1))
    expected = new_tokens(target, inputs)
    with accelerated(target, config=config) as metrics:
        assert new_tokens(target, inputs) == expected
    assert metrics.num_draft_tokens > 2 * metrics.num_drafts


def test_c14_own_tables_stay_and_borrowed_ones_are_the_targets(target, source, tmp_path):
    network = load_dflash(source, "dflash", target, "auto").network
    assert network.lm_head is target.lm_head
    assert network.embed_tokens is target.model.embed_tokens
    own = block_weights(target, ids=IDS, drafted=30, own_embedding=True, size=24)
    network = load_dflash(speculators(tmp_path, target, own, IDS), "dflash", target, "auto").network
    assert torch.equal(network.lm_head.weight, own["lm_head.weight"])
    assert torch.equal(network.embed_tokens.weight, own["embed_tokens.weight"])
    assert network.target_ids.max() == 95 and len(network.target_ids) == 30


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"dflash_config": {"target_layer_ids": [0, 1, 0]}}, (1, 2, 1)),  # outputs of layers
        ({"target_layer_ids": [0, 1, 0], "dflash_config": None}, (1, 2, 1)),
        ({"aux_hidden_state_layer_ids": [0, 2, 1], "speculators_model_type": "dflash"}, (0, 2, 1)),
    ],
    ids=str,
)
def test_c16_ids_by_producer(config, expected, target, weights, tmp_path):
    layer = layer_config(target, weights)
    whole = {**layer, **config, "transformer_layer_config": layer, "block_size": 6}
    whole["mask_token_id"] = 7
    network = load_dflash(write(tmp_path, whole, weights), "dflash", target, "off").network
    assert network.config.hidden_layers == expected
    assert network.config.mask_token_id == 7 and network.drafted == 5


def without(name):
    return lambda w: {n: t for n, t in w.items() if n != name}


def with_extra(*names):
    return lambda w: {**w, **{name: torch.ones(3) for name in names}}


def spoilt(name):
    def spoil(w):
        bad = w[name].clone()
        bad.view(-1)[-1] = float("nan")
        return {**w, name: bad}

    return spoil


WEIGHTS = {
    r"expected layers.0.mlp.up_proj.weight in": without("layers.0.mlp.up_proj.weight"),
    r"expected norm.weight in the weights": without("norm.weight"),
    "none called fc.weight and hidden_norm.weight": without("hidden_norm.weight"),
    "without NaN, got some in fc.weight": spoilt("fc.weight"),
    r"fc.weight of shape \[32, 96\] .*, got \[32, 64\]": lambda w: {
        **w,
        "fc.weight": w["fc.weight"][:, :64],
    },
    "those of a DFlash or DSpark drafter, got layers.0.self_attn.attention_sink_bias": (
        with_extra("layers.0.self_attn.attention_sink_bias")
    ),
    "got one of DFlash2, which": with_extra("candidate_selector.hidden_projection.weight"),
    "got one of XPress, which": with_extra("refiner_head.w.weight"),
    "got one of Domino, which": with_extra("prefix_gru.weight_ih_l0"),
}


@pytest.mark.parametrize("message", WEIGHTS)
def test_c14_weights_that_do_not_fit(message, target, weights, tmp_path):
    changed = WEIGHTS[message]({**weights})
    config = layer_config(target, weights)
    source = zlab(tmp_path, target, {"norm.weight": torch.ones(32), **changed}, (1, 2, 1), **config)
    write(tmp_path, json.loads((tmp_path / "config.json").read_text()), changed)
    expect_error(target, message, source)


CONFIGS = {
    "for a target of 2 layers, got one for 36": dict(num_target_layers=36),
    "mask_token_id from 0 to 95 in config.json, got 96": dict(mask_token_id=96),
    "mask_token_id from 0 to 95 in config.json, got '<mask>'": dict(mask_token_id="<mask>"),
    "block_size from 2 to 1024 in config.json, got 1$": dict(block_size=1),
    "block_size from 2 to 1024 in config.json, got None": dict(block_size=None),
    "expected hidden_act as one of silu": dict(hidden_act="relu"),
    "the same at every length, got 'dynamic'": dict(rope_scaling={"type": "dynamic", "factor": 2}),
    "one rotary embedding for all layers": dict(
        rope_parameters={"full_attention": {"rope_theta": 1e6}}
    ),
    "expected intermediate_size in config.json": dict(intermediate_size=None),
    "q_proj.weight of shape": dict(num_attention_heads=8),
    "layer_types for 2 layers, got 1": dict(layer_types=["full_attention"]),
    "expected sliding_window in config.json": dict(layer_types=["sliding_attention"] * 2),
    "got one of domino, which": dict(projector_type="domino"),
    "DFlash with shift_label": dict(shift_label=True),
    "expected target_layer_ids in config.json": dict(dflash_config={"mask_token_id": 3}),
    "hidden size of 32, as it comes without embed_tokens and lm_head, got one of 24": dict(
        hidden_size=24
    ),
}


@pytest.mark.parametrize("message", CONFIGS)
def test_configs_that_do_not_fit(message, target, weights, tmp_path):
    expect_error(target, message, zlab(tmp_path, target, weights, (1, 2, 1), **CONFIGS[message]))


def test_ids_that_the_target_does_not_have(target, weights, tmp_path):
    source = zlab(tmp_path, target, weights, (1, 2, 3))
    expect_error(target, "expected ids from 0 to 2 for LlamaForCausalLM, got 3", source)


def test_a_small_vocabulary_needs_its_own_head(target, tmp_path):
    small = block_weights(target, ids=IDS, drafted=30)
    for gone, message in (("lm_head.weight", "expected lm_head.weight"), ("d2t", "a map d2t")):
        source = speculators(tmp_path, target, without(gone)(small), IDS, draft_vocab_size=30)
        expect_error(target, message, source)


def test_files_that_cannot_be_read(target, weights, source, tmp_path):
    folder = tmp_path / "drafter"
    (folder / "mask_embedding.pt").write_bytes(b"")
    expect_error(target, "the mask among the target's tokens, got mask_embedding.pt", source)
    (folder / "mask_embedding.pt").unlink()
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    expect_error(target, r"readable weights in .*model.safetensors", source)
    (folder / "model.safetensors").unlink()
    expect_error(target, "model.safetensors or pytorch_model.bin in .*, got neither", source)
    (folder / "config.json").unlink()
    expect_error(target, "expected config.json in", source)
    expect_error(target, "expected config.json in", str(tmp_path / "nothing"))
    with pytest.raises(TypeError, match="Hub id of a DFlash or DSpark drafter, got LlamaForCausal"):
        sdk.patch(target, method="dflash", model=fresh("llama"))
    with pytest.raises(ValueError, match=r"expected a draft model .*'dflash', got None"):
        sdk.patch(target, method="dflash")


def test_a_drafter_of_another_kind(target, source, tmp_path):
    head = safeailab(tmp_path / "e", target, head_weights(target, ids=IDS), IDS)
    expect_error(target, "the weights of a DFlash or DSpark drafter, got none called", head)
    with pytest.raises(ValueError, match="expected 'dflash' for this drafter, got 'eagle3'"):
        sdk.patch(target, method="eagle3", model=source)


def test_a_patched_target_can_be_freed(weights, tmp_path):
    """Also when the drafter has borrowed its tables."""
    model = fresh("llama")
    sdk.patch(model, method="dflash", model=zlab(tmp_path, model, weights, (1, 2, 1)))
    new_tokens(model, batch(random_rows((5,))))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def expect_error(target, message, source):
    with pytest.raises(ValueError, match=message):
        sdk.patch(target, method="dflash", model=source)
    with pytest.raises(ValueError, match="patched model"):
        sdk.metrics(target)
