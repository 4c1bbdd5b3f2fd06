"""MTP checkpoints: where they are looked for, what is read, and what does not fit."""

import json

import pytest
import torch
from mtp_layers import DenseMtp, layer_weights, speculators_mtp
from safetensors.torch import load_file, save_file
from test_mtp_families import made
from tiny import accelerated, batch, fresh, new_tokens, random_rows
from transformers import AutoModelForCausalLM

import specdec_kernels as sdk
from specdec_kernels.hf import checkpoint
from specdec_kernels.hf.mtp import load_mtp
from specdec_kernels.hf.patch import _engines


@pytest.fixture(scope="module")
def target():
    return fresh("llama")


def expect_error(target, message, source, error=ValueError):
    with pytest.raises(error, match=message):
        sdk.patch(target, method="mtp", model=source)
    with pytest.raises(ValueError, match="patched model"):
        sdk.metrics(target)


def test_the_method_is_inferred_from_a_checkpoint_of_layers_alone(target, tmp_path):
    source = speculators_mtp(tmp_path, target, layer_weights(target))
    inputs = batch(random_rows((3, 9)))
    expected = new_tokens(target, inputs)
    with accelerated(target, model=source, num_speculative_tokens=3) as metrics:
        assert new_tokens(target, inputs) == expected
    assert metrics.num_draft_tokens > 0


def test_a_whole_model_drafts_by_itself_unless_it_is_the_target(tmp_path):
    _, target = made("deepseek_v3", tmp_path)
    inputs = batch(random_rows((3, 9)))
    expected = new_tokens(target, inputs)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    other.name_or_path = "elsewhere"
    for model, kind in ((target, "Mtp"), (other, "Draft")):
        with accelerated(model, model=str(tmp_path), num_speculative_tokens=3):
            assert type(_engines[model].draft).__name__ == kind
            assert new_tokens(model, inputs) == expected


def test_only_the_shards_with_mtp_layers_are_read(tmp_path, monkeypatch):
    """The others need not even be there."""
    _, target = made("glm4_moe", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    own = {n: w for n, w in weights.items() if n.startswith("model.layers.2.")}
    halves = list(own)[::2], list(own)[1::2]
    index = {n: "lost.safetensors" for n in weights.keys() - own.keys()}
    for i, names in enumerate(halves):
        save_file({n: own[n] for n in names}, tmp_path / f"{i}.safetensors")
        index |= dict.fromkeys(names, f"{i}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    load_mtp(None, target, "auto")
    opened, original = [], checkpoint.safe_open

    def watched(path, *args):
        opened.append(path.name)
        return original(path, *args)

    monkeypatch.setattr(checkpoint, "safe_open", watched)
    sdk.patch(target, method="mtp")
    assert sorted(opened) == ["0.safetensors", "1.safetensors"]
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected 1.safetensors beside .*index.json"):
        sdk.patch(target, method="mtp")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"expected a weight_map in .*index.json"):
        sdk.patch(target, method="mtp")


def test_qwens_shared_parts_serve_every_layer(target, tmp_path):
    """fc and the norms stand once; both layers' own weights differ."""
    weights = layer_weights(target, 2)
    shared = {"token_layernorm": "pre_fc_norm_embedding", "hidden_layernorm": "pre_fc_norm_hidden"}
    shared |= {"input_proj": "fc", "final_layernorm": "norm"}
    stored, meant = {}, {}
    for name, weight in weights.items():
        layer, _, part = name.partition(".")
        kind = part.removesuffix(".weight")
        meant[name] = weights[f"0.{part}"] if kind in shared else weight
        at = f"mtp.{shared[kind]}.weight" if kind in shared else f"mtp.layers.{layer}.{part}"
        stored.setdefault(at, weight)
    source = speculators_mtp(tmp_path, target, {})
    save_file(stored, tmp_path / "model.safetensors")
    head = load_mtp(source, target, "off").head
    assert head.num_layers == 2
    for layer in head.layers:
        assert torch.equal(layer.proj.weight, weights["0.input_proj.weight"])
    up = head.layers[1].model.layers[0].mlp.up_proj.weight
    assert torch.equal(up, weights["1.mlp.up_proj.weight"])
    assert DenseMtp(target, meant).layers == 2


def without(name):
    return lambda w: {n: t for n, t in w.items() if n != name}


def changed(name, function):
    return lambda w: {**w, name: function(w[name].clone())}


def spoilt(tensor):
    tensor.view(-1)[-1] = float("nan")
    return tensor


WEIGHTS = {
    "expected layers.0.proj.weight in the weights": without("0.input_proj.weight"),
    "expected layers.0.hidden_norm.weight in": without("0.hidden_layernorm.weight"),
    r"expected layers.0.model.layers.0.mlp.up_proj.weight in": without("0.mlp.up_proj.weight"),
    "without NaN, got some in layers.0.proj.weight": changed("0.input_proj.weight", spoilt),
    r"layers.0.proj.weight of shape \[32, 64\] .*, got \[32, 63\]": changed(
        "0.input_proj.weight", lambda w: w[:, :63]
    ),
    "no weights but those of MTP layers, got layers.0.model.layers.0.mlp.gate.weight": lambda w: {
        **w,
        "0.mlp.gate.weight": torch.ones(3),
    },
    "in 32 or 16 bit, got quantised ones with mtp_layers.0.input_proj.weight_scale_inv": lambda w: {
        **w,
        "0.input_proj.weight_scale_inv": torch.ones(1, 1),
    },
}


@pytest.mark.parametrize("message", WEIGHTS)
def test_weights_that_do_not_fit(message, target, tmp_path):
    weights = WEIGHTS[message](layer_weights(target))
    expect_error(target, message, speculators_mtp(tmp_path, target, weights))


CONFIGS = {
    "for hidden states of size 32, got some for 64": dict(hidden_size=64),
    "a language model that transformers knows, got 'unheard_of'": dict(model_type="unheard_of"),
    "got 't5'|has no layers and norm": dict(model_type="t5"),
    "dynamic rotary embeddings change": dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
    r"q_proj.weight of shape \[64, 32\]": dict(num_attention_heads=8),
    "GraniteModel scales what the first": dict(model_type="granite", embedding_multiplier=2.0),
}


@pytest.mark.parametrize("message", CONFIGS)
def test_configs_that_do_not_fit(message, target, tmp_path):
    source = speculators_mtp(tmp_path, target, layer_weights(target), **CONFIGS[message])
    expect_error(target, message, source)


def test_files_that_cannot_be_read(target, tmp_path):
    source = speculators_mtp(tmp_path, target, layer_weights(target))
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    expect_error(target, r"readable weights in .*model.safetensors", source)
    save_file({"model.layers.0.a": torch.ones(1)}, tmp_path / "model.safetensors")
    expect_error(target, r"mtp_layers.\* or model.layers.2.\*, got none of them among 1", source)
    expect_error(target, "got none of them among 0", str(tmp_path / "nothing"))
    expect_error(target, "as the target does not say where it was loaded from", None)
    expect_error(target, "folder or Hub id of MTP layers, got LlamaFor", fresh(), TypeError)
