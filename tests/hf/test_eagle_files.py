"""EAGLE heads on disk: what is found there, and what cannot draft for a target says why."""

import gc
import json
import weakref

import pytest
import torch
from eagle_heads import eagle1, head_weights, layer_config, safeailab, speculators, write
from tiny import accelerated, batch, fresh, new_tokens, random_rows

import specdec_kernels as sdk
from specdec_kernels.hf.eagle import head_method, load_eagle

IDS = (0, 2, 1)


@pytest.fixture(scope="module")
def target():
    return fresh("llama")


@pytest.fixture(scope="module")
def weights(target):
    return head_weights(target, ids=IDS, drafted=30)


def test_the_method_is_found_in_the_weights(target, weights, tmp_path):
    assert head_method(safeailab(tmp_path / "3", target, weights, IDS)) == "eagle3"
    assert head_method(safeailab(tmp_path / "b", target, weights, IDS, binary=True)) == "eagle3"
    stored = torch.load(tmp_path / "b" / "pytorch_model.bin")
    torch.save(stored, tmp_path / "b" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert head_method(tmp_path / "b") == "eagle3"
    assert head_method(speculators(tmp_path / "s", target, weights, IDS)) == "eagle3"
    one = head_weights(target, fused=False, size=target.config.hidden_size)
    assert head_method(eagle1(tmp_path / "1", target, one)) == "eagle"
    target.save_pretrained(tmp_path / "model")
    assert head_method(tmp_path / "model") is None
    assert head_method(target) is None
    assert head_method(tmp_path / "nothing") is None


def test_weights_in_several_files(target, weights, tmp_path):
    from safetensors.torch import save_file

    source = safeailab(tmp_path, target, weights, IDS)
    parts = {"a.safetensors": {}, "b.safetensors": {}}
    stored = {n.replace("layers.0.", "midlayer."): w for n, w in weights.items()}
    for i, (name, tensor) in enumerate(stored.items()):
        parts["ab"[i % 2] + ".safetensors"][name] = tensor.contiguous()
    (tmp_path / "model.safetensors").unlink()
    for file, tensors in parts.items():
        save_file(tensors, tmp_path / file)
    index = {"weight_map": {n: file for file, tensors in parts.items() for n in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert head_method(source) == "eagle3"
    assert set(load_eagle(source, "eagle3", target, "off").head.state_dict()) == {
        n for n in weights if n not in ("d2t", "t2d")
    }
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected b.safetensors beside .*index.json"):
        load_eagle(source, "eagle3", target, "off")


def test_c14_own_tables_stay_and_borrowed_ones_are_the_targets(target, weights, tmp_path):
    source = safeailab(tmp_path / "own", target, weights, IDS, tie_word_embeddings=True)
    head = load_eagle(source, "eagle3", target, "auto").head
    assert torch.equal(head.lm_head.weight, weights["lm_head.weight"])
    assert torch.equal(head.embed_tokens.weight, weights["embed_tokens.weight"])
    size = target.config.hidden_size
    bare = head_weights(target, ids=IDS, size=size, own_embedding=False, own_lm_head=False)
    source = safeailab(tmp_path / "bare", target, bare, IDS, size=size)
    head = load_eagle(source, "eagle3", target, "auto").head
    assert head.lm_head.weight is target.lm_head.weight
    assert head.embed_tokens.weight is target.model.embed_tokens.weight


def without(name):
    return lambda w: {n: t for n, t in w.items() if n != name}


def changed(name, function):
    return lambda w: {**w, name: function(w[name].clone())}


def spoilt(tensor):
    tensor.view(-1)[-1] = float("nan")
    return tensor


def moved(index, offset):
    def move(d2t):
        d2t[index] += offset
        return d2t

    return move


WEIGHTS = {
    "expected lm_head.weight in the weights, got none": without("lm_head.weight"),
    r"expected embed_tokens.weight in the weights": without("embed_tokens.weight"),
    r"expected layers.0.mlp.up_proj.weight in": without("layers.0.mlp.up_proj.weight"),
    "a map d2t from 30 draft tokens to the target's 96, got none": without("d2t"),
    "target ids below 96 in d2t, got 100 for draft token 29": changed("d2t", moved(29, 5)),
    r"target ids below 96 in d2t, got -\d+ for draft token 0": changed("d2t", moved(0, -90)),
    "different target ids in d2t": changed("d2t", lambda d: d * 0 + d[0] - torch.arange(len(d))),
    "d2t for 30 draft tokens, got 29": changed("d2t", lambda d: d[:-1]),
    "without NaN, got some in fc.weight": changed("fc.weight", spoilt),
    r"expected fc.weight of shape \[24, 96\] .*, got \[24, 64\]": changed(
        "fc.weight", lambda w: w[:, :64]
    ),
    r"expected norm.weight of shape \[24\]": changed("norm.weight", lambda w: w[:-1]),
    "no weights but those of an EAGLE head, got mask_hidden": lambda w: {
        **w,
        "mask_hidden": torch.ones(3),
    },
}


@pytest.mark.parametrize("message", WEIGHTS)
def test_c14_c13_weights_that_do_not_fit(message, target, weights, tmp_path):
    source = safeailab(tmp_path, target, WEIGHTS[message](weights), IDS)
    expect_error(target, message, source)


CONFIGS = {
    "hidden states of size 32, got one for 64": dict(target_hidden_size=64),
    "expected hidden_act as one of silu": dict(hidden_act="relu"),
    "the same at every length, got 'dynamic'": dict(rope_scaling={"type": "dynamic", "factor": 2}),
    "expected input_norm.weight in the weights": dict(norm_before_fc=True),
    "expected fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight in": dict(fc_norm=True),
    r"q_proj.weight of shape \[64, 48\]": dict(num_attention_heads=8),
}


@pytest.mark.parametrize("message", CONFIGS)
def test_configs_that_do_not_fit(message, target, weights, tmp_path):
    expect_error(target, message, safeailab(tmp_path, target, weights, IDS, **CONFIGS[message]))


def test_an_eagle_1_head_of_another_size(target, tmp_path):
    one = head_weights(target, fused=False, size=24)
    source = write(tmp_path, layer_config(target, size=24), one)
    with pytest.raises(ValueError, match="hidden states of size 32, got one for 24"):
        sdk.patch(target, model=source)


def test_a_patched_target_can_be_freed(tmp_path):
    """Also when the head has borrowed its tables."""
    model = fresh("llama")
    size = model.config.hidden_size
    bare = head_weights(model, ids=IDS, size=size, own_embedding=False, own_lm_head=False)
    sdk.patch(model, model=safeailab(tmp_path, model, bare, IDS, size=size))
    new_tokens(model, batch(random_rows((5,))))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


NESTED = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 0]}}
TOP = {"eagle_aux_hidden_state_layer_ids": [0, 2, 1]}


@pytest.mark.parametrize(
    "config, expected",
    [
        (NESTED, (1, 2, 1)),  # SpecForge, NVIDIA: outputs of layers
        (NESTED | {"eagle_aux_hidden_state_layer_ids": [0, 1, 0]}, (1, 2, 1)),  # and lifted
        ({"target_layer_ids": [0, 1, 0]}, (1, 2, 1)),  # DeepSpec
        (TOP, (0, 2, 1)),  # vLLM: inputs
        ({"aux_hidden_state_layer_ids": [0, 2, 1]}, (0, 2, 1)),
        (TOP | NESTED | {"speculators_model_type": "eagle3"}, (0, 2, 1)),
    ],
    ids=str,
)
def test_c16_ids_by_producer(config, expected, target, weights, tmp_path):
    layer = layer_config(target)
    whole = {**layer, **config, "transformer_layer_config": layer}
    head = load_eagle(write(tmp_path, whole, weights), "eagle3", target, "off").head
    assert head.config.hidden_layers == expected


def test_ids_that_the_target_does_not_have(target, weights, tmp_path):
    expect_error(target, "expected ids from 0 to 2", safeailab(tmp_path, target, weights))
    source = speculators(tmp_path / "s", target, weights, (0, 1, 3))
    expect_error(target, "expected ids from 0 to 2 for LlamaForCausalLM, got 3", source)


def test_files_that_cannot_be_read(target, weights, tmp_path):
    source = safeailab(tmp_path, target, weights, IDS)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    expect_error(target, r"readable weights in .*model.safetensors", source)
    (tmp_path / "model.safetensors").unlink()
    expect_error(target, r"model.safetensors or pytorch_model.bin in .*, got neither", source)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no zip")
    expect_error(target, r"readable weights in .*pytorch_model.bin", source)
    (tmp_path / "config.json").write_text("{")
    expect_error(target, r"expected JSON in .*config.json", source)
    (tmp_path / "config.json").unlink()
    expect_error(target, "expected config.json in", source)
    expect_error(target, "expected config.json in", str(tmp_path / "nothing"))
    write(tmp_path, {"hidden_size": 24}, weights)
    expect_error(target, "expected intermediate_size, num_attention_heads in config.json", source)
    write(tmp_path, {"hidden_size": 24}, {"model.norm.weight": torch.ones(3)})
    expect_error(target, "expected the weights of an EAGLE head, got none called fc.weight", source)


def test_a_head_of_the_other_kind_or_of_no_kind(target, weights, tmp_path):
    source = safeailab(tmp_path, target, weights, IDS)
    with pytest.raises(ValueError, match="method: expected 'eagle3' for this drafter, got 'eagle'"):
        sdk.patch(target, method="eagle", model=source)
    with pytest.raises(TypeError, match="folder or Hub id of an EAGLE head, got LlamaForCausalLM"):
        sdk.patch(target, method="eagle3", model=fresh("llama"))
    with pytest.raises(ValueError, match=r"expected a draft model or heads for .*, got None"):
        sdk.patch(target, method="eagle3")
    with pytest.raises(ValueError, match="draft_tree_depth: expected at least 1, got 0"):
        sdk.patch(target, model=source, draft_tree_depth=0)
    with pytest.raises(ValueError, match="patched model"):
        sdk.metrics(target)


def expect_error(target, message, source):
    with pytest.raises(ValueError, match=message):
        sdk.patch(target, method="eagle3", model=source)
    with pytest.raises(ValueError, match="patched model"):
        sdk.metrics(target)


@pytest.mark.parametrize(
    "rope",
    [
        dict(rope_scaling={"rope_type": "linear", "factor": 4.0}),
        dict(
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        ),
        dict(rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
    ],
)
def test_rotary_embeddings_are_those_of_the_config(rope, target, weights, tmp_path):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    source = safeailab(tmp_path, target, weights, IDS, **rope)
    got = load_eagle(source, "eagle3", target, "off").head.config
    layer = layer_config(target, **rope)
    if "rope_parameters" in rope:
        theta = layer.pop("rope_parameters")["rope_theta"]
        expected = theta ** -(torch.arange(0, 8, 2) / 8)
        torch.testing.assert_close(got.inv_freq, expected)
        return
    expected = LlamaRotaryEmbedding(LlamaConfig(**layer))
    torch.testing.assert_close(got.inv_freq, expected.inv_freq)
    assert not torch.allclose(got.inv_freq, 500.0 ** -(torch.arange(0, 8, 2) / 8))
    inputs = batch(random_rows((5,)))
    plain = new_tokens(target, inputs)
    with accelerated(target, model=source, num_speculative_tokens=3):
        assert new_tokens(target, inputs) == plain
