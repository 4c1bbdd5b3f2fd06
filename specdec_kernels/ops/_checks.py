"""Argument checks of the public ops. Each message names the op, what was expected and what came."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def expect(
    op: str,
    name: str,
    tensor: Tensor,
    shape: str,
    dtypes: Sequence[torch.dtype],
    sizes: dict[str, int],
    like: Tensor | None = None,
) -> None:
    """Checks `tensor` against a shape such as "B, T, V" and learns unknown letters into `sizes`.

    A number in `shape` must match exactly, "*" anything. With `like`, the devices must agree.
    Raises TypeError for a wrong type, dtype or device and ValueError for a wrong shape.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: expected {name} as a tensor [{shape}], got {type(tensor).__name__}")
    letters = _letters(shape)
    got = list(tensor.shape)
    matches = len(letters) == len(got)
    if matches:
        for letter, size in zip(letters, got, strict=True):
            if letter.isdigit():
                matches = matches and int(letter) == size
            elif letter != "*":
                matches = matches and sizes.setdefault(letter, size) == size
    if not matches:
        known = {k: v for k, v in sizes.items() if k in letters}
        raise ValueError(f"{op}: expected {name} [{shape}] with {known}, got {got}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(
            f"{op}: expected {name} as {wanted}, got {str(tensor.dtype).removeprefix('torch.')}"
        )
    if like is None or (tensor.is_cpu and like.is_cpu):
        return
    if tensor.device != like.device:
        raise TypeError(f"{op}: expected {name} on {like.device}, got {tensor.device}")


_known_shapes: dict[str, list[str]] = {}


def _letters(shape: str) -> list[str]:
    if torch.compiler.is_dynamo_compiling():  # it would compile anew when the dictionary grows
        return [part.strip() for part in shape.split(",")]
    letters = _known_shapes.get(shape)
    if letters is None:
        letters = _known_shapes[shape] = [part.strip() for part in shape.split(",")]
    return letters


def wants_grad(*inputs: object) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(t, Tensor) and t.requires_grad for t in inputs
    )


def expect_no_grad(op: str, *tensors: Tensor | None) -> None:
    """The ops have no backward: a grad-requiring input with grad enabled is an error."""
    if wants_grad(*tensors):
        raise RuntimeError(
            f"{op}: expected inputs without gradients, got one that requires grad; "
            "call it under torch.no_grad() or torch.inference_mode()"
        )
