"""DFlash drafters: read, fitted to their target, and what outlives their runs.

z-lab: a Qwen3 config with dflash_config beside it, ids of hidden states (target_layer_ids) as
outputs of layers. speculators: the layers' config in transformer_layer_config, ids as transformers
counts, and where fewer tokens can be drafted an lm_head with a map d2t.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_kernels.drafting.acceptance import SlotAcceptance
from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.drafting.dflash import BlockConfig, BlockNetwork, BlockRun
from specdec_kernels.hf.attention import UnsupportedModelError
from specdec_kernels.hf.checkpoint import fill, has_file, read_checkpoint
from specdec_kernels.hf.draft import weight_of
from specdec_kernels.hf.eagle_layouts import (
    draft_vocab_size,
    layer_ids,
    layer_settings,
    num_layers,
    renamed,
    target_ids,
)
from specdec_kernels.hf.features import FeatureTap
from specdec_kernels.hf.layers import OwnLayers

KIND = "a DFlash drafter"
MASK_FILE = "mask_embedding.pt"

# Relatives of DFlash, by a part of the names of weights that only they have.
RELATIVES = {
    "candidate_selector.": "DFlash2",
    "attention_conv.": "DFlash2",
    "markov_head.": "DSpark",
    "refiner_head.": "XPress",
    "gru": "Domino",
}


class DFlash(OwnLayers):
    """What outlives the runs: the network, the switches of its layers and what was learnt."""

    def __init__(self, network: BlockNetwork, target: PreTrainedModel, linear: str):
        super().__init__(network, linear)
        self.network = network
        own = sum(p.numel() for p in (network.fc.weight, *network.layers.parameters()))
        head = sum(p.numel() for p in network.lm_head.parameters())
        self.cost = DraftCost((own + head) / max(weight_of(target), 1), most=1)
        self.acceptance = SlotAcceptance()

    def run(
        self, batch: int, max_slots: int, device: torch.device, warn: Callable[[str], None]
    ) -> DFlashRun:
        return DFlashRun(self, batch, max_slots, device)


class DFlashRun(BlockRun):
    def __init__(self, dflash: DFlash, batch: int, max_slots: int, device: torch.device):
        learnt = dflash.cost, dflash.acceptance
        super().__init__(dflash.network, batch, max_slots, device, *learnt, dflash.around)
        self.runner = dflash


def is_dflash(names: Container[str]) -> bool:
    """DFlash or a relative, by its renamed weights."""
    return "hidden_norm.weight" in names and "fc.weight" in names


def load_dflash(source: Any, target: PreTrainedModel, linear: str) -> DFlash:
    """The drafter, if it can draft for `target`.

    Raises:
        TypeError, ValueError: naming what was expected and what came.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"model: expected the folder or Hub id of {KIND}, got {type(source).__name__}"
        )
    return fit_dflash(*read_dflash(source), target, linear)


def read_dflash(source: str | os.PathLike) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`read_checkpoint`; raises ValueError also for a mask that is no token of the target."""
    if has_file(source, MASK_FILE):
        raise ValueError(f"model: expected the mask among the target's tokens, got {MASK_FILE}")
    return read_checkpoint(source)


def fit_dflash(
    config: dict[str, Any], weights: Mapping[str, Tensor], target: PreTrainedModel, linear: str
) -> DFlash:
    """`load_dflash` from what `read_dflash` found."""
    weights = renamed(weights)
    if not is_dflash(weights):
        raise ValueError(
            f"model: expected the weights of {KIND}, got none called fc.weight and "
            "hidden_norm.weight"
        )
    _expect_no_relative(config, weights)
    settings = _settings(config, weights, target)
    ids = target_ids(weights, settings.draft_vocab_size, settings.vocab_size)
    weights.pop("d2t", None)
    network = _network(settings, weights, target, None if ids is None else ids.to(target.device))
    _fill(network, weights, target)
    try:
        FeatureTap(target, settings.hidden_layers)
    except UnsupportedModelError as error:
        raise ValueError(f"model: {error}") from error
    return DFlash(network, target, linear)


def reread(dflash: DFlash, target: PreTrainedModel, linear: str, layers: tuple[int, ...]) -> DFlash:
    """The same weights, not copied, over other hidden states of the target.

    Raises ValueError for hidden states that `target` does not have.
    """
    old = dflash.network
    config = dataclasses.replace(old.config, hidden_layers=layers)
    FeatureTap(target, layers)
    parameters = dict(old.named_parameters())
    network = BlockNetwork(config, parameters, old.embed_tokens, old.lm_head, old.target_ids)
    fill(network, {}, parameters, target, KIND)
    return DFlash(network, target, linear)


def _expect_no_relative(config: dict[str, Any], weights: Mapping[str, Tensor]) -> None:
    found = next(
        (name for part, name in RELATIVES.items() if any(part in key for key in weights)), None
    )
    if found is None and _setting(config, "projector_type") not in (None, "dflash"):
        found = str(_setting(config, "projector_type"))
    if found is None and _setting(config, "sample_from_anchor"):
        found = "DFlash with sample_from_anchor"
    if found is not None:
        raise ValueError(f"model: expected {KIND}, got one of {found}, which is not supported")


def _setting(config: dict[str, Any], name: str, default: Any = None) -> Any:
    """At the top of config.json, or in its dflash_config."""
    nested = config.get("dflash_config") or {}
    value = config.get(name)
    return nested.get(name, default) if value is None else value


def _settings(
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
        logit_scale=layer.get("logit_scale") or 1.0,
        softcap=layer.get("final_logit_softcapping"),
        max_positions=layer.get("max_position_embeddings"),
        **layer_settings(layer, target.device),
    )


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

    Layers with a window are causal unless the config says otherwise, the others are not.
    """
    types = layer.get("layer_types")
    if not types or (_setting(config, "use_swa") and "sliding_attention" not in types):
        types = ["sliding_attention" if _setting(config, "use_swa") else "full_attention"] * number
    if len(types) < number:
        raise ValueError(f"model: expected layer_types for {number} layers, got {len(types)}")
    window = _setting(config, "swa_window_size", layer.get("sliding_window"))
    sliding = [kind == "sliding_attention" for kind in types[:number]]
    if any(sliding) and not window:
        raise ValueError("model: expected sliding_window in config.json, got none")
    causal = layer.get("is_causal", _setting(config, "causal"))
    if causal is None and config.get("sliding_window_non_causal"):
        causal = False
    return (
        tuple(window if slides else None for slides in sliding),
        tuple(slides if causal is None else bool(causal) for slides in sliding),
    )


def _network(
    settings: BlockConfig,
    names: Container[str],
    target: PreTrainedModel,
    ids: Tensor | None,
) -> BlockNetwork:
    """Without its weights; the target's tables stand in for those that it comes without."""
    table, head = target.get_input_embeddings(), target.get_output_embeddings()
    borrows = [n for n in ("embed_tokens", "lm_head") if f"{n}.weight" not in names]
    size = table.weight.shape[1]
    if borrows and settings.hidden_size != size:
        raise ValueError(
            f"model: expected a drafter of the target's hidden size of {size}, as it comes without "
            f"{' and '.join(borrows)}, got one of {settings.hidden_size}"
        )
    if "lm_head" in borrows and (head is None or settings.draft_vocab_size != settings.vocab_size):
        raise ValueError("model: expected lm_head.weight in the weights, got none")
    return BlockNetwork(settings, names, table, head, ids)


def _fill(network: BlockNetwork, weights: dict[str, Tensor], target: PreTrainedModel) -> None:
    tables = {"embed_tokens": network.embed_tokens, "lm_head": network.lm_head}
    borrowed = {
        f"{table}.{name}": parameter
        for table, module in tables.items()
        for name, parameter in module.named_parameters()
        if f"{table}.weight" not in weights
    }
    fill(network, weights, borrowed, target, KIND)
