"""MTP layers: found in the target's checkpoint or in one of their own, read and fitted."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoConfig, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from specdec_kernels.drafting.mtp import MtpRun
from specdec_kernels.drafting.window import chains
from specdec_kernels.hf.attention import UnsupportedModelError
from specdec_kernels.hf.checkpoint import read_config, read_weights, weight_names
from specdec_kernels.hf.features import FeatureTap, decoder_of
from specdec_kernels.hf.filling import fill, tables
from specdec_kernels.hf.loaded import LoadedHead
from specdec_kernels.hf.mtp_layouts import QUANTISED, Found, find, stacked
from specdec_kernels.hf.mtp_network import Model, MtpHead, finish, single_layer
from specdec_kernels.hf.support import rope_reason


class Mtp(LoadedHead):
    def __init__(self, head: MtpHead, target: PreTrainedModel, linear: str):
        super().__init__(head, target, linear)
        self.head = head

    def run(
        self, batch: int, max_slots: int, device: torch.device, warn: Callable[[str], None]
    ) -> MtpModelRun:
        return MtpModelRun(self, batch, max_slots, device)


class MtpModelRun(MtpRun):
    def __init__(self, mtp: Mtp, batch: int, max_slots: int, device: torch.device):
        super().__init__(mtp.head, batch, max_slots, device, mtp.cost, mtp.around)
        self.runner = mtp


def load_mtp(source: Any, target: PreTrainedModel, linear: str) -> Mtp:
    """The layers, if they can draft for `target`.

    source: a folder or Hub id; None means where the target itself came from.

    Raises:
        TypeError, ValueError: naming what was expected and what came.
    """
    if source is None:
        source = target.name_or_path
        if not source:
            raise ValueError(
                "model: expected the folder or Hub id of MTP layers, as the target does not say "
                "where it was loaded from; got None"
            )
    elif not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"model: expected the folder or Hub id of MTP layers, got {type(source).__name__}"
        )
    text = target.config.get_text_config()
    found = _find(source, text.num_hidden_layers)
    kind, config = _layer_of(read_config(source) or {}, target)
    if config.hidden_size != text.hidden_size:
        raise ValueError(
            f"model: expected MTP layers for hidden states of size {text.hidden_size}, "
            f"got some for {config.hidden_size}"
        )
    reason = rope_reason(config)
    if reason:
        raise ValueError(f"model: expected MTP layers that can be verified in windows: {reason}")
    wanted = frozenset(found.names.values())
    read = read_weights(source, wanted.__contains__)
    mtp = Mtp(_head(found, read, kind, config, target), target, linear)
    _try(mtp, target)
    return mtp


def reread(mtp: Mtp, target: PreTrainedModel, linear: str, states: int, hidden_first: bool) -> Mtp:
    """The same weights, not copied, with another hidden state or another order of the two inputs.

    Raises ValueError for hidden states that `target` does not have.
    """
    old = mtp.head
    weights: Any = old.state_dict(keep_vars=True)
    FeatureTap(target, (states,))
    head = MtpHead(
        [layer.model for layer in old.layers],
        weights,
        states=states,
        hidden_first=hidden_first,
        vocab_size=old.vocab_size,
        max_positions=old.max_positions,
    )
    fill(head, {}, weights, target, "MTP layers")
    return Mtp(head.eval(), target, linear)


def _find(source: str | os.PathLike, layers: int) -> Found:
    names = weight_names(source)
    found = find(names, layers)
    if not found.names:
        raise ValueError(
            f"model: expected MTP layers in {os.fspath(source)!r}, tensors called mtp.*, "
            f"mtp_layers.*, model.mtp_layers.* or model.layers.{layers}.*, got none of them among "
            f"{len(names)}"
        )
    quantised = sorted(n for n in found.names.values() if n.endswith(QUANTISED))
    if quantised:
        raise ValueError(
            f"model: expected MTP layers in 32 or 16 bit, got quantised ones with {quantised[0]}"
        )
    return found


def _layer_of(config: dict[str, Any], target: PreTrainedModel) -> tuple[Model, PretrainedConfig]:
    """The class of model whose layer it is, and its config: the target's, but for speculators."""
    layer = config.get("transformer_layer_config")
    if layer is None:
        decoder: Any = decoder_of(target)
        return type(decoder), decoder.config
    try:
        made = AutoConfig.for_model(**layer)
        kind = MODEL_MAPPING[type(made)]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "model: expected a transformer_layer_config with the model_type of a language model "
            f"that transformers knows, got {layer.get('model_type')!r}: {error}"
        ) from error
    return kind[0] if isinstance(kind, tuple) else kind, made


def _head(
    found: Found,
    read: dict[str, Any],
    kind: Model,
    config: PretrainedConfig,
    target: PreTrainedModel,
) -> MtpHead:
    text = target.config.get_text_config()
    weights = {name: read[old] for name, old in found.names.items()}
    models = [single_layer(kind, config, found.names) for _ in range(found.num_layers)]
    borrowed = tables(weights, text.hidden_size, text.vocab_size, target)
    head = MtpHead(
        models,
        weights.keys() | borrowed.keys(),
        states=text.num_hidden_layers,
        hidden_first=found.hidden_first,
        vocab_size=text.vocab_size,
        max_positions=getattr(config, "max_position_embeddings", None),
    )
    fill(head, stacked(weights, head.state_dict()), borrowed, target, "MTP layers")
    for model in models:
        finish(model, target.device)
    return head.eval()


@torch.no_grad()
def _try(mtp: Mtp, target: PreTrainedModel) -> None:
    """A small forward: what a layer cannot do shows here rather than in `generate`."""
    head, run = mtp.head, mtp.run(1, 8, target.device, lambda text: None)
    size, layer = target.config.get_text_config().hidden_size, head.layers[0]
    given: list[Tensor] = []

    def keep(module: nn.Module, args: tuple, options: dict[str, Any]) -> None:
        given.append(args[0] if args else options["hidden_states"])

    handles = [
        layer.proj.register_forward_hook(lambda module, args, output: given.append(output)),
        layer.model.layers[0].register_forward_pre_hook(keep, with_kwargs=True),
    ]
    try:
        FeatureTap(target, head.hidden_layers)
        run.begin(torch.zeros(1, 4, size, dtype=head.dtype, device=target.device), [4])
        run.kv.reserve(8)
        run.forward(chains(torch.ones(1, 4, dtype=torch.int64, device=target.device), [4]))
    except UnsupportedModelError as error:
        raise ValueError(f"model: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    if not torch.equal(*given):
        kind = type(layer.model).__name__
        raise ValueError(f"model: expected a layer alone, but {kind} scales what the first reads")
