"""EAGLE heads on disk: what their producers write differently, made one.

SafeAILab, SpecForge, AngelSlim and NVIDIA: `midlayer.*` (EAGLE-1 and 2: `layers.0.*`), the config
of a Llama; ids of hidden states, if any, in eagle_config, as outputs of layers. speculators:
`layers.0.*`, the layer's config in transformer_layer_config, ids as transformers counts. DeepSpec:
`layers.0.*`, target_layer_ids as outputs of layers, no map of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec_kernels.drafting.eagle import HeadConfig
from specdec_kernels.drafting.layers import ACTIVATIONS

Value = TypeVar("Value")

# Of no use here: buffers, the trainer's copies of the target, the map from target to draft ids.
UNUSED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight", "t2d")
NAMES = {
    "model.": "",
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}

# Where ids may stand, the first preferred; 1 where they count outputs of layers.
ID_KEYS = {
    "target_layer_ids": 1,
    "dflash_config.target_layer_ids": 1,
    "eagle_config.eagle_aux_hidden_state_layer_ids": 1,
    "eagle_aux_hidden_state_layer_ids": 0,
    "aux_hidden_state_layer_ids": 0,
}


class LayerIds(NamedTuple):
    """name: of the setting, with dots. added: what makes `ids` those that transformers counts."""

    name: str
    ids: tuple[int, ...]
    added: int

    @property
    def inputs(self) -> tuple[int, ...]:
        return tuple(k + self.added for k in self.ids)


def renamed(weights: Mapping[str, Value]) -> dict[str, Value]:
    """Weights under the names that `Head` has, and d2t."""
    out = {}
    for name, tensor in weights.items():
        for old, new in NAMES.items():
            name = new + name[len(old) :] if name.startswith(old) else name
        if not name.endswith(UNUSED):
            out[name] = tensor
    return out


def is_fused(weights: Container[str]) -> bool:
    """EAGLE-3, by its renamed weights, rather than EAGLE-1 or 2."""
    return "layers.0.hidden_norm.weight" in weights


def head_config(
    config: dict[str, Any], weights: dict[str, Tensor], target: PreTrainedModel
) -> HeadConfig:
    """From config.json and the renamed weights.

    Raises:
        ValueError: for what is missing in the config, and what a head cannot do.
    """
    text, layer = target.config.get_text_config(), config.get("transformer_layer_config", config)
    fused = is_fused(weights)
    return HeadConfig(
        fused=fused,
        hidden_layers=_hidden_layers(config, text.num_hidden_layers, fused),
        target_hidden_size=text.hidden_size,
        num_layers=num_layers(weights),
        vocab_size=text.vocab_size,
        draft_vocab_size=draft_vocab_size(config, weights, text.vocab_size),
        window=_window(layer),
        max_positions=layer.get("max_position_embeddings"),
        **layer_settings(layer, target.device),
        **_norms(config, weights),
    )


def layer_settings(layer: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The fields of LayerConfig from the config of a layer.

    Raises:
        ValueError: for what is missing, and what a layer cannot do.
    """
    _expect_known(layer)
    heads = layer["num_attention_heads"]
    dim = layer.get("head_dim") or layer["hidden_size"] // heads
    inv_freq, rope_scale = _rope(layer, heads, dim)
    return dict(
        hidden_size=layer["hidden_size"],
        intermediate_size=layer["intermediate_size"],
        num_heads=heads,
        num_kv_heads=layer.get("num_key_value_heads") or heads,
        head_dim=dim,
        inv_freq=inv_freq.to(device),
        rope_scale=rope_scale,
        eps=layer.get("rms_norm_eps", 1e-6),
        activation=layer.get("hidden_act", "silu"),
    )


def _expect_known(layer: dict[str, Any]) -> None:
    needed = ("hidden_size", "intermediate_size", "num_attention_heads")
    missing = [key for key in needed if layer.get(key) is None]
    if missing:
        raise ValueError(f"model: expected {', '.join(missing)} in config.json, got none")
    activation = layer.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"model: expected hidden_act as one of {known}, got {activation!r}")


def _norms(config: dict[str, Any], weights: Container[str]) -> dict[str, Any]:
    """What the config says, at its top or in eagle_config, else what the weights or writers do."""
    nested = config.get("eagle_config") or {}
    found = {
        "norm_before_fc": "input_norm.weight" in weights,
        "fc_norm": "fc_norm.0.weight" in weights,
        "norm_before_residual": "speculators_model_type" in config,
        "norm_output": False,
    }
    for name in found:
        value = config.get(name, nested.get(name))
        found[name] = found[name] if value is None else bool(value)
    return found


def target_ids(weights: dict[str, Tensor], drafted: int, vocab: int) -> Tensor | None:
    """The target's id of each draft id from their differences d2t, or None when they are equal."""
    if "d2t" not in weights:
        if drafted != vocab:
            raise ValueError(
                f"model: expected a map d2t from {drafted} draft tokens to the target's {vocab}, "
                "got none"
            )
        return None
    ids = torch.arange(len(weights["d2t"])) + weights["d2t"].long()
    if len(ids) != drafted:
        raise ValueError(f"model: expected d2t for {drafted} draft tokens, got {len(ids)}")
    outside = (ids < 0) | (ids >= vocab)
    if bool(outside.any()):
        first = int(outside.nonzero()[0])
        raise ValueError(
            f"model: expected target ids below {vocab} in d2t, got {int(ids[first])} for draft "
            f"token {first}"
        )
    if len(ids.unique()) != len(ids):
        raise ValueError("model: expected different target ids in d2t, got some of them twice")
    return None if drafted == vocab and bool((weights["d2t"] == 0).all()) else ids


def _hidden_layers(config: dict[str, Any], num_layers: int, fused: bool) -> tuple[int, ...]:
    """As transformers counts: what layer k reads; its output is what layer k + 1 reads."""
    if not fused:
        return (num_layers,)
    found = layer_ids(config)
    return found[0].inputs if found else (2, num_layers // 2, num_layers - 3)


def layer_ids(config: dict[str, Any]) -> list[LayerIds]:
    """All ids of hidden states in config.json; the first ones count. speculators counts inputs."""
    found, inputs_only = [], "speculators_model_type" in config
    for name, added in ID_KEYS.items():
        *folders, key = name.split(".")
        inner = config
        for folder in folders:
            inner = inner.get(folder) or {}
        if inner.get(key) and not (added and inputs_only):
            found.append(LayerIds(name, tuple(int(k) for k in inner[key]), added))
    return found


def draft_vocab_size(config: dict[str, Any], weights: dict[str, Tensor], vocab: int) -> int:
    for name in ("lm_head.weight", "d2t"):
        if name in weights:
            return len(weights[name])
    return config.get("draft_vocab_size") or vocab


def num_layers(weights: Iterable[str]) -> int:
    """By the renamed weights: num_hidden_layers of the config is often that of the target."""
    return 1 + max((int(n.split(".")[1]) for n in weights if n.startswith("layers.")), default=0)


def _window(layer: dict[str, Any]) -> int | None:
    sliding = "sliding_attention" in (layer.get("layer_types") or ())
    return layer.get("sliding_window") if sliding else None


def _rope(layer: dict[str, Any], heads: int, dim: int) -> tuple[Tensor, float]:
    """Frequencies fp32 [D / 2] and the factor of sine and cosine, as transformers computes them."""
    rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or layer.get("rope_theta") or 10000.0
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"model: expected one rotary embedding for all layers, got {rope}")
    kind = rope.pop("type", None)
    kind = rope.setdefault("rope_type", kind or "default")
    if kind in ("dynamic", "longrope"):
        raise ValueError(
            f"model: expected rotary embeddings that stay the same at every length, got {kind!r}"
        )
    config = LlamaConfig(
        hidden_size=heads * dim,
        num_attention_heads=heads,
        head_dim=dim,
        max_position_embeddings=layer.get("max_position_embeddings") or 2048,
        rope_theta=theta,
        rope_scaling=None if kind == "default" else rope,
    )
    embedding = LlamaRotaryEmbedding(config)
    return embedding.inv_freq.float(), float(embedding.attention_scaling)
