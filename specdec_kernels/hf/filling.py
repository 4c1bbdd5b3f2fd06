"""Weights of a checkpoint, and tables of the target, into the network of a head."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

FEW = 6  # names in a message


def tables(
    weights: Container[str], size: int, drafted: int, target: PreTrainedModel
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


def fill(
    head: nn.Module,
    weights: Mapping[str, Tensor],
    borrowed: Mapping[str, nn.Parameter],
    target: PreTrainedModel,
    what: str,
) -> None:
    """Gives `head` its parameters, in the target's dtype, and its buffers, in their own.

    Raises ValueError for weights that are missing, unknown, of another shape or not numbers.
    """
    expected = head.state_dict(keep_vars=True)
    missing = sorted(expected.keys() - weights.keys() - borrowed.keys())
    if missing:
        raise ValueError(
            f"model: expected {_listed(missing)} in the weights, got none; of the target's only "
            "tables of the same shape can stand in"
        )
    unknown = sorted(weights.keys() - expected.keys())
    if unknown:
        raise ValueError(f"model: expected no weights but those of {what}, got {_listed(unknown)}")
    for name, old in expected.items():
        owner = head.get_submodule(name.rpartition(".")[0])
        value: Tensor | None = borrowed.get(name)
        if value is None:
            tensor = weights[name]
            if tensor.shape != old.shape:
                raise ValueError(
                    f"model: expected {name} of shape {list(old.shape)} for this target and "
                    f"config.json, got {list(tensor.shape)}"
                )
            if bool(tensor.isnan().any()):
                raise ValueError(f"model: expected weights without NaN, got some in {name}")
            if isinstance(old, nn.Parameter):
                moved = tensor.to(target.device, target.dtype)
                value = nn.Parameter(moved, requires_grad=False)
            else:
                value = tensor.to(target.device)
        setattr(owner, name.rpartition(".")[2], value)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(names[:FEW]) + more
