"""EAGLE heads: found, read and fitted to their target, and what outlives their runs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_kernels.drafting.eagle import Head, HeadRun
from specdec_kernels.hf.attention import UnsupportedModelError
from specdec_kernels.hf.checkpoint import read_checkpoint, weight_names
from specdec_kernels.hf.dflash_layouts import dflash_method
from specdec_kernels.hf.eagle_layouts import head_config, is_fused, renamed, target_ids
from specdec_kernels.hf.features import FeatureTap
from specdec_kernels.hf.filling import fill, tables
from specdec_kernels.hf.loaded import LoadedHead
from specdec_kernels.hf.mtp_layouts import find, holds_nothing_else


class Eagle(LoadedHead):
    def __init__(self, head: Head, target: PreTrainedModel, linear: str):
        super().__init__(head, target, linear)
        self.head = head

    def run(
        self, batch: int, max_slots: int, device: torch.device, warn: Callable[[str], None]
    ) -> EagleRun:
        return EagleRun(self, batch, max_slots, device)


class EagleRun(HeadRun):
    def __init__(self, eagle: Eagle, batch: int, max_slots: int, device: torch.device):
        super().__init__(eagle.head, batch, max_slots, device, eagle.cost, eagle.around)
        self.runner = eagle


def head_method(source: Any, target: PreTrainedModel | None = None) -> str | None:
    """The method of a drafter, other than a model, that lies in a folder or at a Hub id, or None.

    One of "eagle3", "eagle", "dflash", "dspark" and "mtp". A whole model with MTP layers drafts by
    itself, unless it is the target.
    """
    if not isinstance(source, (str, os.PathLike)):
        return None
    found = weight_names(source)
    if holds_nothing_else(found):
        return "mtp"
    if target is not None and os.fspath(source) == target.name_or_path:
        layers = target.config.get_text_config().num_hidden_layers
        if find(found, layers).names:
            return "mtp"
    return _kind(renamed(dict.fromkeys(found)))


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
    borrowed = tables(weights, settings.hidden_size, settings.draft_vocab_size, target)
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
