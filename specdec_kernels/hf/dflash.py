"""DFlash and DSpark drafters: read, fitted to their target, and what outlives their runs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_kernels.drafting.acceptance import SlotAcceptance
from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.drafting.dflash import BlockConfig, BlockNetwork, BlockRun, DSparkNetwork
from specdec_kernels.hf.attention import UnsupportedModelError
from specdec_kernels.hf.checkpoint import fill, has_file, read_checkpoint
from specdec_kernels.hf.dflash_layouts import (
    KIND,
    block_config,
    dflash_method,
    expect_no_relative,
    further_heads,
)
from specdec_kernels.hf.draft import weight_of
from specdec_kernels.hf.eagle_layouts import renamed, target_ids
from specdec_kernels.hf.features import FeatureTap
from specdec_kernels.hf.layers import OwnLayers

MASK_FILE = "mask_embedding.pt"


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


def load_dflash(source: Any, method: str, target: PreTrainedModel, linear: str) -> DFlash:
    """The drafter, if it can draft for `target`.

    Raises:
        TypeError, ValueError: naming what was expected and what came.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"model: expected the folder or Hub id of {KIND}, got {type(source).__name__}"
        )
    return fit_dflash(*read_dflash(source), method, target, linear)


def read_dflash(source: str | os.PathLike) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`read_checkpoint`; raises ValueError also for a mask that is no token of the target."""
    if has_file(source, MASK_FILE):
        raise ValueError(f"model: expected the mask among the target's tokens, got {MASK_FILE}")
    return read_checkpoint(source)


def fit_dflash(
    config: dict[str, Any],
    weights: Mapping[str, Tensor],
    method: str,
    target: PreTrainedModel,
    linear: str,
) -> DFlash:
    """`load_dflash` from what `read_dflash` found."""
    weights = renamed(weights)
    found = dflash_method(weights)
    if found is None:
        raise ValueError(
            f"model: expected the weights of {KIND}, got none called fc.weight and "
            "hidden_norm.weight"
        )
    expect_no_relative(config, weights)
    if found != method:
        raise ValueError(f"method: expected {found!r} for this drafter, got {method!r}")
    settings = block_config(config, weights, target)
    ids = target_ids(weights, settings.draft_vocab_size, settings.vocab_size)
    weights.pop("d2t", None)
    heads = further_heads(weights)
    ids = None if ids is None else ids.to(target.device)
    network = _network(settings, weights, target, ids, heads)
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
    tables = old.embed_tokens, old.lm_head, old.target_ids
    network = BlockNetwork(config, parameters, *tables)
    if isinstance(old, DSparkNetwork):
        further: dict[str, Any] = dict(rank=old.rank, with_markov=old.with_markov)
        network = DSparkNetwork(config, parameters, *tables, **further)
    fill(network, {}, parameters, target, KIND)
    return DFlash(network, target, linear)


def _network(
    settings: BlockConfig,
    names: Container[str],
    target: PreTrainedModel,
    ids: Tensor | None,
    heads: dict[str, Any] | None,
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
    if heads is not None:
        return DSparkNetwork(settings, names, table, head, ids, **heads)
    return BlockNetwork(settings, names, table, head, ids)


def _fill(network: BlockNetwork, weights: dict[str, Tensor], target: PreTrainedModel) -> None:
    """Tables that equal the target's, as DeepSpec writes them, are the target's."""
    tables = {
        "embed_tokens": (network.embed_tokens, target.get_input_embeddings()),
        "lm_head": (network.lm_head, target.get_output_embeddings()),
    }
    borrowed: dict[str, nn.Parameter] = {}
    for table, (module, its) in tables.items():
        name = f"{table}.weight"
        if name not in weights:
            borrowed |= {f"{table}.{part}": p for part, p in module.named_parameters()}
        elif type(getattr(its, "weight", None)) is nn.Parameter and _equal(
            weights[name], its.weight
        ):
            borrowed[name] = its.weight
            del weights[name]
    fill(network, weights, borrowed, target, KIND)


def _equal(own: Tensor, its: Tensor) -> bool:
    return own.shape == its.shape and torch.equal(own.to(its.device, its.dtype), its)
