"""What a draft checkpoint is, and what can be said of it without running it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels.drafting.dflash import BlockConfig, BlockNetwork
from specdec_kernels.drafting.eagle import Head, HeadConfig
from specdec_kernels.drafting.intersection import Intersection
from specdec_kernels.drafting.transcript import TextTranslation
from specdec_kernels.hf.checkpoint import read_config
from specdec_kernels.hf.dflash import DFlash
from specdec_kernels.hf.draft import PADDING, Draft
from specdec_kernels.hf.eagle import Eagle
from specdec_kernels.hf.eagle_layouts import layer_ids
from specdec_kernels.hf.medusa import MedusaHeads
from specdec_kernels.hf.model import max_positions
from specdec_kernels.hf.mtp import Mtp
from specdec_kernels.hf.mtp_network import MtpHead
from specdec_kernels.hf.vocabulary import find_tokenizer, token_names


class Check(NamedTuple):
    """status: "ok", "warning" or "error"."""

    name: str
    status: str
    detail: str


def check_eagle(
    config: dict[str, Any], weights: Mapping[str, Tensor], eagle: Eagle, target: Any
) -> list[Check]:
    """config, weights: as they lie there; `eagle`: what the loader made of them."""
    layer, head = config.get("transformer_layer_config", config), eagle.head
    return [
        _shapes(head, target),
        _vocabulary(layer.get("vocab_size"), target),
        _drafted(weights, head),
        _hidden_states(config, head.config, last_only=not head.config.fused),
        _norms(config, eagle),
        _rope(layer, target),
        _positions(head.config.max_positions, target),
        _borrowed(head, target),
        _finite(head),
    ]


def check_dflash(
    config: dict[str, Any], weights: Mapping[str, Tensor], dflash: DFlash, target: Any
) -> list[Check]:
    """As `check_eagle`."""
    layer, network = config.get("transformer_layer_config", config), dflash.network
    own = network.config
    mask = f"token {own.mask_token_id} in blocks of {own.block_size}"
    tokenizer = find_tokenizer("target", target)
    if tokenizer is not None:
        name = token_names(tokenizer).get(own.mask_token_id, "which has no name")
        mask += f", {name!r} to the target"
    return [
        _shapes(network, target),
        _vocabulary(layer.get("vocab_size"), target),
        _drafted(weights, network),
        _hidden_states(config, own),
        Check("mask", "ok", mask),
        _attention(own),
        _rope(layer, target),
        _positions(own.max_positions, target),
        _borrowed(network, target),
        _finite(network),
    ]


def check_mtp(mtp: Mtp, target: Any) -> list[Check]:
    head = mtp.head
    joined = "hidden state, token" if head.hidden_first else "token, hidden state"
    return [
        _shapes(head, target),
        Check("hidden states", "ok", f"{head.hidden_layers[0]}: the last, behind the final norm"),
        Check("inputs", "ok", f"joined as {joined}"),
        _positions(head.max_positions, target),
        _borrowed(head, target),
        _finite(head),
    ]


def check_medusa(source: str, heads: MedusaHeads, target: Any) -> list[Check]:
    config = read_config(source) or {}
    said = config.get("medusa_num_heads")
    number = Check("heads", "ok", f"{heads.number} heads in the weights")
    if said not in (None, heads.number):
        detail = f"{heads.number} heads in the weights, {said} in config.json: the weights count"
        number = number._replace(status="warning", detail=detail)
    output: Any = heads.heads[0]
    return [number, _vocabulary(output[-1].out_features, target)]


def check_model(draft: Draft, target: Any) -> list[Check]:
    own, its = find_tokenizer("draft", draft.model), find_tokenizer("target", target)
    names = Check("tokenizer", "warning", "no tokenizers to compare lie with both models")
    if own is not None and its is not None:
        here, there = token_names(own), token_names(its)
        strangers = sum(here[i] != there[i] for i in here.keys() & there.keys())
        sizes = f"{len(here)} tokens here, {len(there)} there"
        detail = f"{sizes}, {strangers} with different names"
        names = Check("tokenizer", "warning" if strangers else "ok", detail)
        if draft.translation is not None:
            names = Check("tokenizer", "ok", f"another one, {sizes}: {_way(draft.translation)}")
    size = draft.model.config.get_text_config().vocab_size
    return [names, _vocabulary(size, target), _positions(max_positions(draft.model), target)]


def _way(translation: Intersection | TextTranslation) -> str:
    if isinstance(translation, Intersection):
        return f"drafts the {len(translation.pairs)} tokens that both have"
    return "drafts text"


def _shapes(network: torch.nn.Module, target: Any) -> Check:
    size = target.config.get_text_config().hidden_size
    number = len(list(network.parameters()))
    return Check("shapes", "ok", f"{number} tensors fit config.json and hidden states of {size}")


def _vocabulary(size: int | None, target: Any) -> Check:
    vocab = target.config.get_text_config().vocab_size
    if size is None or size == vocab:
        return Check("vocabulary", "ok", f"the target's, {vocab} tokens")
    detail = f"{size} tokens, the target has {vocab}"
    if abs(size - vocab) <= PADDING:
        return Check("vocabulary", "ok", f"{detail}: padding")
    return Check("vocabulary", "warning", detail)


def _drafted(weights: Mapping[str, Tensor], network: Head | BlockNetwork) -> Check:
    config, ids = network.config, network.target_ids
    share = config.draft_vocab_size / config.vocab_size
    detail = f"{config.draft_vocab_size} of {config.vocab_size} tokens ({share:.0%})"
    if ids is None:
        return Check("draft vocabulary", "ok", f"{detail}, no map")
    detail += f", d2t maps to {int(ids.min())}..{int(ids.max())}, each once"
    listed = weights.get("t2d")
    if listed is not None and not torch.equal(listed.nonzero().flatten(), ids.cpu().sort().values):
        return Check("draft vocabulary", "warning", f"{detail}; t2d lists other tokens")
    return Check("draft vocabulary", "ok", detail)


def _hidden_states(
    config: dict[str, Any], own: HeadConfig | BlockConfig, last_only: bool = False
) -> Check:
    read = ", ".join(map(str, own.hidden_layers))
    if last_only:
        return Check("hidden states", "ok", f"{read}: the last, behind the final norm")
    found = layer_ids(config)
    if not found:
        return Check("hidden states", "ok", f"{read}: the defaults, as config.json has no ids")
    first, *others = found
    side = "outputs" if first.added else "inputs"
    detail = f"{read}: {first.name} {list(first.ids)}, read as {side} of layers"
    for other in others:
        if other.ids != first.ids and other.inputs != first.inputs:  # some are lifted copies
            detail += f"; {other.name} {list(other.ids)} says otherwise"
            return Check("hidden states", "warning", detail)
    return Check("hidden states", "ok", detail)


def _norms(config: dict[str, Any], eagle: Eagle) -> Check:
    nested, parts = config.get("eagle_config") or {}, []
    for name in ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"):
        said = config.get(name, nested.get(name)) is not None
        value = str(getattr(eagle.head.config, name)).lower()
        parts.append(f"{name} {value}{'' if said else ' (not in config.json)'}")
    return Check("norms", "ok", ", ".join(parts))


def _attention(own: BlockConfig) -> Check:
    kinds = [
        f"{'all' if window is None else f'a window of {window}'}{', causal' if causal else ''}"
        for window, causal in zip(own.windows, own.causal, strict=True)
    ]
    return Check("attention", "ok", "; ".join(f"layer {i}: {kind}" for i, kind in enumerate(kinds)))


def _rope(layer: dict[str, Any], target: Any) -> Check:
    text = target.config.get_text_config()
    own, its = _theta(layer), _theta(text.to_dict())
    if its is None or own == its:
        return Check("rope theta", "ok", f"{own or 10000.0:g}")
    origin = f"{own:g}" if own else "10000, as config.json has none"
    detail = f"{origin}; the target has {its:g}: right only if the head was trained so"
    return Check("rope theta", "warning", detail)


def _theta(config: dict[str, Any]) -> float | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("rope_theta") or config.get("rope_theta")


def _positions(most: int | None, target: Any) -> Check:
    its = max_positions(target)
    if most is None or its is None or most >= its:
        return Check("positions", "ok", f"{most or 'no limit'}, the target has {its or 'no limit'}")
    detail = f"{most}, the target has {its}: drafting stops at {most} tokens"
    return Check("positions", "warning", detail)


def _borrowed(head: Head | MtpHead | BlockNetwork, target: Any) -> Check:
    output = target.get_output_embeddings()
    tables = {
        "embed_tokens": head.embed_tokens.weight is target.get_input_embeddings().weight,
        "lm_head": head.lm_head.weight is getattr(output, "weight", None),
    }
    names = [name for name, is_the_targets in tables.items() if is_the_targets]
    return Check("borrowed", "ok", " and ".join(names) or "nothing")


def _finite(module: torch.nn.Module) -> Check:
    for name, parameter in module.named_parameters():
        if not bool(parameter.isfinite().all()):
            detail = f"infinities in {name} in {_dtype(parameter)}"
            return Check("finite", "error", detail)
    return Check("finite", "ok", "no NaN, no infinities")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
