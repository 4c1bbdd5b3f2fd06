"""Medusa heads: found on disk, checked against their target, and run."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from specdec_kernels.drafting.acceptance import SlotAcceptance
from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.hf.draft import PADDING, weight_of
from specdec_kernels.hf.layers import LayerFlip
from specdec_kernels.medusa_trees import Paths

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
KEY = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")

Weights = dict[str, Tensor]  # by key, without the prefix


class ResBlock(nn.Module):
    """x + SiLU(W x + b)"""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class MedusaHeads:
    """The `Heads` of one target: each is a row of ResBlocks and a projection to the vocabulary.

    linear: as in SpeculativeConfig; drafts need no invariance.
    """

    def __init__(self, heads: Iterable[nn.Module], target: PreTrainedModel, linear: str):
        self.heads = nn.ModuleList(heads)
        self.number = len(self.heads)
        self.hidden_layer: int = target.config.get_text_config().num_hidden_layers
        self.vocab = _vocab(target)
        self.cost = DraftCost(_size(self.heads) / self.number / weight_of(target), most=self.number)
        self.acceptance = SlotAcceptance()
        self._layers = None if linear == "off" else LayerFlip(self.heads)

    @property
    def runner(self) -> MedusaHeads:
        return self

    def run(self, *size: Any) -> MedusaHeads:
        """The heads of one run: these, as they keep nothing of a text."""
        return self

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Around many calls of this thread."""
        return contextlib.nullcontext() if self._layers is None else self._layers.hold()

    def logits(self, states: Tensor, levels: int) -> list[Tensor]:
        layers = self._layers
        with contextlib.nullcontext() if layers is None else layers.verify(len(states)):
            return [head(states)[:, : self.vocab] for head in self.heads[:levels]]


def reread(heads: MedusaHeads, target: PreTrainedModel, linear: str, layer: int) -> MedusaHeads:
    """The same weights, not copied, over another hidden state of the target."""
    other = MedusaHeads(heads.heads, target, linear)
    other.hidden_layer = layer
    return other


def load_heads(
    source: Any,
    target: PreTrainedModel,
    linear: str,
    depth: int | None = None,
    choices: Paths | None = None,
) -> MedusaHeads:
    """The heads in a file, a folder or a repository of the Hub, in the target's dtype.

    How many there are, and of how many layers, the weights say: config.json is often wrong. Those
    beyond `depth` are left out.

    Raises:
        TypeError, ValueError: naming what was expected and what came.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            "model: expected a file, a folder or a Hub id of Medusa heads, "
            f"got {type(source).__name__}"
        )
    path = find_heads(os.fspath(source))
    if path is None:
        raise ValueError(
            f"model: expected a file, or a folder or Hub id with {' or '.join(FILES)}, "
            f"got {os.fspath(source)!r}"
        )
    weights = _known(_read(path), path)
    numbers = sorted({int(key.split(".")[0]) for key in weights})
    if numbers != list(range(len(numbers))):
        raise ValueError(
            f"model: expected heads 0 to {numbers[-1]}, got only {', '.join(map(str, numbers))} "
            f"in {path}"
        )
    numbers = numbers[:depth]
    deepest = max(choices or [()], key=len)
    if len(deepest) > len(numbers):
        raise ValueError(
            f"medusa_choices: expected paths of at most {len(numbers)} levels, one a head, "
            f"got {deepest}"
        )
    heads = [_head(i, weights, target) for i in numbers]
    return MedusaHeads(heads, target, linear)


def find_heads(source: str) -> str | None:
    """The file of Medusa heads: `source` itself, or one in a folder or a repository of the Hub."""
    if os.path.isfile(source):
        return source
    for name in FILES:
        try:
            found = cached_file(source, name)
        except (OSError, ValueError):
            continue
        if found is not None:
            return found
    return None


def _read(path: str) -> Any:
    try:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each of the two formats has many ways to be broken
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"model: expected a whole file of tensors, got {path}: {type(error).__name__}: {reason}"
        ) from error


def _known(content: Any, path: str) -> Weights:
    keys = content if isinstance(content, Mapping) else {}
    weights: Weights = {}
    for key, value in keys.items():
        match = KEY.fullmatch(str(key))
        if match is None or not isinstance(value, Tensor):
            raise ValueError(
                "model: expected keys such as 0.0.linear.weight, 0.0.linear.bias and 0.1.weight "
                f"of tensors, got {key!r} of {type(value).__name__} in {path}"
            )
        weights[str(key).removeprefix("medusa_head.")] = value
    if not weights:
        raise ValueError(f"model: expected Medusa heads, got none in {path}")
    return weights


def _head(i: int, weights: Weights, target: PreTrainedModel) -> nn.Sequential:
    size = target.config.get_text_config().hidden_size
    own = {key for key in weights if key.startswith(f"{i}.")}
    last = max(int(key.split(".")[1]) for key in own)
    blocks = []
    for j in range(last):
        weight = _take(weights, own, f"{i}.{j}.linear.weight", target, size)
        bias = _take(weights, own, f"{i}.{j}.linear.bias", target, size)
        if len(weight) != size:
            raise _wrong_shape(f"{i}.{j}.linear.weight", f"[{size}, {size}]", weight)
        blocks.append(ResBlock(_linear(weight, bias)))
    name, vocab = f"{i}.{last}.weight", _vocab(target)
    weight = _take(weights, own, name, target, size)
    if abs(len(weight) - vocab) > PADDING:
        raise _wrong_shape(name, f"the target's vocabulary of {vocab} in front", weight)
    if own:
        raise ValueError(f"model: head {i}: unexpected {', '.join(sorted(own))}")
    return nn.Sequential(*blocks, _linear(weight, None))


def _take(
    weights: Weights, left: set[str], name: str, target: PreTrainedModel, size: int
) -> Tensor:
    """As the target keeps its own: [..., size], without NaN and infinities."""
    value = weights.get(name)
    if value is None:
        raise ValueError(f"model: expected {name}, got only {', '.join(sorted(left))}")
    left.discard(name)
    if value.dim() != (1 if name.endswith("bias") else 2) or value.shape[-1] != size:
        raise _wrong_shape(name, f"the target's hidden size of {size} at the end", value)
    value = value.to(target.device, target.dtype).contiguous()
    if not bool(value.isfinite().all()):
        raise ValueError(f"model: expected finite weights in {target.dtype}, got others in {name}")
    return value


def _wrong_shape(name: str, expected: str, value: Tensor) -> ValueError:
    return ValueError(f"model: {name}: expected {expected}, got {list(value.shape)}")


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    out = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    out.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        out.bias = nn.Parameter(bias, requires_grad=False)
    return out


def _vocab(model: PreTrainedModel) -> int:
    return model.config.get_text_config().vocab_size


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
