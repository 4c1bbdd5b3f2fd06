"""MTP layers on disk: what families call their parts, made one.

DeepSeek, GLM: `model.layers.{N + i}.*` behind the N layers of the target. Qwen: `mtp.*`, with the
layers in `mtp.layers.{i}.*`. MiMo: `model.mtp_layers.{i}.*`, the hidden state first; MiMo-V2:
`model.mtp.layers.{i}.*`. speculators: `mtp_layers.{i}.*` in a checkpoint of its own, the layer's
config in transformer_layer_config.
All of them read the target's last hidden state after its final norm, and pass on their own output
after the norm behind the layer, as transformers, SGLang and vLLM do.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

PARTS = {
    "token_layernorm.": "token_norm.",
    "enorm.": "token_norm.",
    "pre_fc_norm_embedding.": "token_norm.",
    "hidden_layernorm.": "hidden_norm.",
    "hnorm.": "hidden_norm.",
    "pre_fc_norm_hidden.": "hidden_norm.",
    "input_proj.": "proj.",
    "eh_proj.": "proj.",
    "fc.": "proj.",
    "final_layernorm.": "model.norm.",
    "shared_head.norm.": "model.norm.",
    "norm.": "model.norm.",
    # MiMo-V2's own names within the layer
    "pre_mlp_layernorm.": "model.layers.0.post_attention_layernorm.",
    "self_attn.attention_sink_bias": "model.layers.0.self_attn.sinks",
}
# The target's own tables again, and buffers.
UNUSED = ("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq")
QUANTISED = ("weight_scale_inv", "weight_scale", "weight_packed", "qweight", "qzeros", "scales")

PREFIX = r"(?:model\.|language_model\.)*"
OWN = (
    re.compile(rf"{PREFIX}mtp_layers\.(?P<layer>\d+)\.(?P<part>.+)"),
    re.compile(rf"{PREFIX}mtp\.layers\.(?P<layer>\d+)\.(?P<part>.+)"),
    re.compile(rf"{PREFIX}mtp\.(?P<part>(?!layers\.).+)"),  # of all layers
)
BEHIND = re.compile(rf"{PREFIX}layers\.(?P<layer>\d+)\.(?P<part>.+)")


class Found(NamedTuple):
    """names: of tensors in the checkpoint, by the name that `MtpHead` has for them."""

    names: dict[str, str]
    num_layers: int
    hidden_first: bool


def find(names: Iterable[str], num_hidden_layers: int) -> Found:
    """The MTP layers among the tensors of a checkpoint, for a target with so many layers."""
    by_layer: dict[int, dict[str, str]] = {}
    shared, hidden_first = {}, False
    for name in sorted(names):
        match = next((m for m in (p.fullmatch(name) for p in OWN) if m), None)
        start = 0
        if match is None:
            match, start = BEHIND.fullmatch(name), num_hidden_layers
        if match is None or name.endswith(UNUSED):
            continue
        layer, part = match.groupdict().get("layer"), _renamed(match["part"])
        if layer is None:
            shared[part] = name
        elif int(layer) >= start:
            by_layer.setdefault(int(layer) - start, {})[part] = name
        hidden_first |= name.startswith("model.mtp_layers.")
    found = {
        f"layers.{i}.{part}": name
        for i, own in by_layer.items()
        for part, name in {**shared, **own}.items()
    }
    return Found(found, 1 + max(by_layer, default=-1), hidden_first)


def holds_nothing_else(names: Iterable[str]) -> bool:
    """Whether a checkpoint is of MTP layers only, and tables."""
    others = [n for n in names if not n.endswith(("embed_tokens.weight", "lm_head.weight"))]
    return bool(others) and all(any(p.fullmatch(n) for p in OWN) for n in others)


def stacked(weights: dict[str, Tensor], expected: Container[str]) -> dict[str, Tensor]:
    """Experts that lie one by one, where the model has all of them in one tensor.

    `experts.{e}.gate_proj.weight` [I, d], up_proj as well and down_proj [d, I] become
    `experts.gate_up_proj` [E, 2 I, d] and `experts.down_proj` [E, d, I].
    """
    out: dict[str, Tensor] = {}
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in weights.items():
        match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match is None or f"{match[1]}.down_proj" not in expected:
            out[name] = tensor
        else:
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
    for name, kinds in experts.items():
        gate, up, down = ([t for _, t in sorted(kinds[k].items())] for k in ("gate", "up", "down"))
        joined = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        out[f"{name}.gate_up_proj"], out[f"{name}.down_proj"] = (
            torch.stack(joined),
            torch.stack(down),
        )
    return out


def _renamed(part: str) -> str:
    for old, new in PARTS.items():
        if part.startswith(old):
            return new + part[len(old) :]
    return f"model.layers.0.{part}"
