"""DFlash and DSpark drafters on disk: what their producers write differently, made one.

z-lab, DeepSpec: a Qwen3 config with dflash_config beside it or its settings in it, ids of hidden
states (target_layer_ids) as outputs of layers. speculators: the layers' config in
transformer_layer_config, ids as transformers counts, and where fewer tokens can be drafted an
lm_head with a map d2t.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from specdec_kernels.drafting.dflash import BlockConfig
from specdec_kernels.hf.eagle_layouts import (
    draft_vocab_size,
    layer_ids,
    layer_settings,
    num_layers,
)

KIND = "a DFlash or DSpark drafter"

# Relatives of DFlash, by a part of the names of weights that only they have.
RELATIVES = {
    "candidate_selector.": "DFlash2",
    "attention_conv.": "DFlash2",
    "refiner_head.": "XPress",
    "gru": "Domino",
}


def dflash_method(names: Container[str]) -> str | None:
    """ "dspark", or "dflash" also for other relatives, by the renamed weights; None for others."""
    if "hidden_norm.weight" not in names or "fc.weight" not in names:
        return None
    return "dspark" if "markov_head.markov_w1.weight" in names else "dflash"


def expect_no_relative(config: dict[str, Any], weights: Mapping[str, Tensor]) -> None:
    found = next(
        (name for part, name in RELATIVES.items() if any(part in key for key in weights)), None
    )
    if found is None and _setting(config, "projector_type") not in (None, "dflash"):
        found = str(_setting(config, "projector_type"))
    if found is None and _setting(config, "shift_label"):
        found = "DFlash with shift_label"
    kind = _setting(config, "markov_head_type")
    if found is None and kind not in (None, "vanilla"):
        found = f"DSpark with markov_head_type {kind!r}"
    if found is not None:
        raise ValueError(f"model: expected {KIND}, got one of {found}, which is not supported")


def _setting(config: dict[str, Any], name: str, default: Any = None) -> Any:
    """At the top of config.json, or in its dflash_config."""
    nested = config.get("dflash_config") or {}
    value = config.get(name)
    return nested.get(name, default) if value is None else value


def block_config(
    config: dict[str, Any], weights: dict[str, Tensor], target: PreTrainedModel
) -> BlockConfig:
    text, layer = target.config.get_text_config(), config.get("transformer_layer_config", config)
    said = config.get("num_target_layers")
    if said not in (None, text.num_hidden_layers):
        raise ValueError(
            f"model: expected a drafter for a target of {text.num_hidden_layers} layers, got one "
            f"for {said}"
        )
    found = layer_ids(config)
    if not found:
        raise ValueError("model: expected target_layer_ids in config.json, got none")
    windows, causal = _attention(config, layer, num_layers(weights))
    return BlockConfig(
        hidden_layers=found[0].inputs,
        target_hidden_size=text.hidden_size,
        windows=windows,
        causal=causal,
        block_size=_whole(config, "block_size", 2, 1025),
        mask_token_id=_whole(config, "mask_token_id", 0, text.vocab_size),
        vocab_size=text.vocab_size,
        draft_vocab_size=draft_vocab_size(config, weights, text.vocab_size),
        from_anchor=_from_anchor(config, weights),
        logit_scale=layer.get("logit_scale") or 1.0,
        softcap=layer.get("final_logit_softcapping"),
        max_positions=layer.get("max_position_embeddings"),
        **layer_settings(layer, target.device),
    )


def _from_anchor(config: dict[str, Any], weights: Container[str]) -> bool:
    """DSpark does unless its config says otherwise, DFlash does not."""
    said = _setting(config, "sample_from_anchor")
    if said is None:
        named = "DSpark" in str(config.get("architectures"))
        return named or dflash_method(weights) == "dspark"
    return bool(said)


def further_heads(weights: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """The further arguments of DSparkNetwork, None for DFlash: the weights tell."""
    if dflash_method(weights) != "dspark":
        return None
    rank = weights["markov_head.markov_w1.weight"].shape[-1]
    confidence = weights.get("confidence_head.proj.weight")
    size = len(weights["norm.weight"]) if "norm.weight" in weights else 0
    with_markov = confidence is not None and confidence.shape[-1] != size
    return dict(rank=rank, with_markov=with_markov)


def _whole(config: dict[str, Any], name: str, least: int, end: int) -> int:
    value = _setting(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < end:
        raise ValueError(
            f"model: expected {name} from {least} to {end - 1} in config.json, got {value!r}"
        )
    return value


def _attention(
    config: dict[str, Any], layer: dict[str, Any], number: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Per layer its window and whether it is causal within a block, as vLLM reads it.

    Layers that layer_types calls sliding are causal unless the config says otherwise, others not.
    """
    types = layer.get("layer_types") or ["full_attention"] * number
    if len(types) < number:
        raise ValueError(f"model: expected layer_types for {number} layers, got {len(types)}")
    window = _setting(config, "swa_window_size", layer.get("sliding_window"))
    called = [kind == "sliding_attention" for kind in types[:number]]
    everywhere = bool(_setting(config, "use_swa")) and not any(called)
    sliding = [everywhere or slides for slides in called]
    if any(sliding) and not window:
        raise ValueError("model: expected sliding_window in config.json, got none")
    causal = layer.get("is_causal", _setting(config, "causal"))
    if causal is None and config.get("sliding_window_non_causal"):
        causal = False
    return (
        tuple(window if slides else None for slides in sliding),
        tuple(slides if causal is None else bool(causal) for slides in called),
    )
