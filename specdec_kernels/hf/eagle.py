"""EAGLE heads: found, read and fitted to their target, and what outlives their runs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.drafting.eagle import Head, HeadRun
from specdec_kernels.hf.attention import UnsupportedModelError
from specdec_kernels.hf.checkpoint import fill, read_checkpoint, weight_names
from specdec_kernels.hf.dflash_layouts import dflash_method
from specdec_kernels.hf.draft import weight_of
from specdec_kernels.hf.eagle_layouts import head_config, is_fused, renamed, target_ids
from specdec_kernels.hf.features import FeatureTap
from specdec_kernels.hf.layers import OwnLayers


class Eagle(OwnLayers):
    """What outlives the runs: the head, the switches of its layers and its measured cost."""

    def __init__(self, head: Head, target: PreTrainedModel, linear: str):
        super().__init__(head, linear)
        self.head = head
        size = sum(p.numel() for p in head.parameters()) - head.embed_tokens.weight.numel()
        self.cost = DraftCost(size / max(weight_of(target), 1))

    def run(
        self, batch: int, max_slots: int, device: torch.device, warn: Callable[[str], None]
    ) -> EagleRun:
        return EagleRun(self, batch, max_slots, device)


class EagleRun(HeadRun):
    def __init__(self, eagle: Eagle, batch: int, max_slots: int, device: torch.device):
        super().__init__(eagle.head, batch, max_slots, device, eagle.cost, eagle.around)
        self.runner = eagle


def head_method(source: Any) -> str | None:
    """ "eagle3", "eagle", "dflash" or "dspark" when such a drafter lies in a folder or at a Hub id.

    None for anything else.
    """
    if not isinstance(source, (str, os.PathLike)):
        return None
    return _kind(renamed(dict.fromkeys(weight_names(source))))


def _kind(names: Container[str]) -> str | None:
    block = dflash_method(names)
    if block is not None:
        return block
    if "fc.weight" not in names:
        return None
    return "eagle3" if is_fused(names) else "eagle"


def load_eagle(source: Any, method: str, target: PreTrainedModel, linear: str) -> Eagle:
    """The head, if it can draft for `target`.

    Raises:
        TypeError, ValueError: naming what was expected and what came.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"model: expected the folder or Hub id of an EAGLE head, got {type(source).__name__}"
        )
    return fit_eagle(*read_checkpoint(source), method, target, linear)


def fit_eagle(
    config: dict[str, Any],
    weights: Mapping[str, Tensor],
    method: str,
    target: PreTrainedModel,
    linear: str,
) -> Eagle:
    """`load_eagle` from what `read_checkpoint` found."""
    weights = renamed(weights)
    found = _kind(weights)
    if found is None:
        raise ValueError("model: expected the weights of an EAGLE head, got none called fc.weight")
    if found != method:
        raise ValueError(f"method: expected {found!r} for this drafter, got {method!r}")
    settings = head_config(config, weights, target)
    own = settings.target_hidden_size if settings.fused else settings.hidden_size
    claimed = config.get("target_hidden_size") or own
    if claimed != settings.target_hidden_size:
        raise ValueError(
            f"model: expected a head for hidden states of size {settings.target_hidden_size}, "
            f"got one for {claimed}"
        )
    ids = target_ids(weights, settings.draft_vocab_size, settings.vocab_size)
    weights.pop("d2t", None)
    borrowed = _borrowed(weights, settings.hidden_size, settings.draft_vocab_size, target)
    names = weights.keys() | borrowed.keys()
    head = Head(settings, names, None if ids is None else ids.to(target.device))
    fill(head, weights, borrowed, target, "an EAGLE head")
    try:
        FeatureTap(target, settings.hidden_layers)
    except UnsupportedModelError as error:
        raise ValueError(f"model: {error}") from error
    return Eagle(head.eval(), target, linear)


def reread(eagle: Eagle, target: PreTrainedModel, linear: str, **changes: Any) -> Eagle:
    """The same weights, not copied, with other settings of HeadConfig.

    Raises ValueError for hidden states that `target` does not have.
    """
    old, weights = eagle.head, dict(eagle.head.named_parameters())
    head = Head(dataclasses.replace(old.config, **changes), weights, old.target_ids)
    FeatureTap(target, head.config.hidden_layers)
    fill(head, {}, weights, target, "an EAGLE head")
    return Eagle(head.eval(), target, linear)


def _borrowed(
    weights: dict[str, Tensor], size: int, drafted: int, target: PreTrainedModel
) -> dict[str, nn.Parameter]:
    """The target's own tables for those that the head comes without, where their shapes agree."""
    found: dict[str, nn.Parameter] = {}
    vocab = target.config.get_text_config().vocab_size
    for name, module, rows in (
        ("embed_tokens", target.get_input_embeddings(), vocab),
        ("lm_head", target.get_output_embeddings(), drafted),
    ):
        weight: Any = getattr(module, "weight", None)
        fits = isinstance(weight, nn.Parameter) and weight.shape == (rows, size)
        if fits and weight.is_floating_point() and f"{name}.weight" not in weights:
            found[f"{name}.weight"] = weight
            if getattr(module, "bias", None) is not None:
                found[f"{name}.bias"] = module.bias
    return found
