"""What a draft checkpoint is: its kind, and what `specdec doctor` says about it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from specdec_kernels.cli.model import HUB_ID
from specdec_kernels.hf.dflash import DFlash
from specdec_kernels.hf.draft import Draft
from specdec_kernels.hf.eagle import head_method
from specdec_kernels.hf.eagle_layouts import renamed
from specdec_kernels.hf.medusa import MedusaHeads, find_heads
from specdec_kernels.hf.mtp import Mtp


def kind_of(source: str, target: Any) -> str:
    """The method that drafts with what lies there.

    One of medusa, eagle3, eagle, mtp, dflash, dspark and draft_model.

    Raises ValueError where nothing lies, and for weights that cannot be read.
    """
    if not os.path.exists(source) and not HUB_ID.fullmatch(source):
        raise ValueError(f"expected a checkpoint, got no file or folder {source!r}")
    if os.path.isfile(source):
        return "medusa"
    method = head_method(source, target)
    if method is not None:
        return method
    return "medusa" if find_heads(source) is not None else "draft_model"


def describe_eagle(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """From config.json and the weights by their own names."""
    layer, names = config.get("transformer_layer_config", config), renamed(weights)
    producer = "SafeAILab, SpecForge, AngelSlim or NVIDIA"
    if "speculators_model_type" in config:
        producer = "speculators"
    elif "target_layer_ids" in config:
        producer = "DeepSpec"
    drafted = names.get("lm_head.weight", names.get("d2t"))
    return {
        "layout": producer,
        "num_layers": len({n.split(".")[1] for n in names if n.startswith("layers.")}),
        "hidden_size": layer.get("hidden_size"),
        "vocab_size": layer.get("vocab_size") or config.get("vocab_size"),
        "draft_vocab_size": None if drafted is None else len(drafted),
        "dtype": _dtype(names["fc.weight"]),
        "parameters": sum(w.numel() for w in names.values() if w.is_floating_point()),
    }


def describe_dflash(dflash: DFlash, config: Mapping[str, Any]) -> dict[str, Any]:
    own = dflash.network.config
    return {
        "layout": "speculators" if "speculators_model_type" in config else "z-lab or DeepSpec",
        "num_layers": len(own.causal),
        "hidden_size": own.hidden_size,
        "vocab_size": own.vocab_size,
        "draft_vocab_size": own.draft_vocab_size,
        "block_size": own.block_size,
        "parameters": sum(p.numel() for p in dflash.network.layers.parameters()),
    }


def describe_mtp(mtp: Mtp) -> dict[str, Any]:
    head: Any = mtp.head
    return {
        "architecture": type(head.layers[0].model).__name__,
        "num_layers": head.num_layers,
        "hidden_size": head.layers[0].model.config.hidden_size,
        "parameters": sum(p.numel() for p in head.layers.parameters()),
    }


def describe_medusa(heads: MedusaHeads) -> dict[str, Any]:
    output: Any = heads.heads[0]
    return {
        "num_heads": heads.number,
        "num_layers": len(output) - 1,
        "hidden_size": output[-1].in_features,
        "vocab_size": output[-1].out_features,
        "parameters": sum(p.numel() for p in heads.heads.parameters()),
    }


def describe_model(draft: Draft) -> dict[str, Any]:
    text = draft.model.config.get_text_config()
    return {
        "architecture": type(draft.model).__name__,
        "num_layers": getattr(text, "num_hidden_layers", None),
        "hidden_size": getattr(text, "hidden_size", None),
        "vocab_size": text.vocab_size,
        "dtype": str(getattr(text, "dtype", None)).removeprefix("torch."),
        "parameters": draft.model.num_parameters(),
    }


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
