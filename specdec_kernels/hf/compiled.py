"""Verify forwards through torch.compile."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_kernels.cache import RaggedKV

BACKEND = "inductor"


def logits_of(model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    return model(**inputs).logits


class CompiledForwards:
    """`logits_of`, compiled once per shape [B, T] of windows."""

    def __init__(self) -> None:
        self._by_shape: dict[tuple[int, ...], Callable[..., Tensor]] = {}

    def of(self, shape: tuple[int, ...]) -> Callable[..., Tensor]:
        if shape not in self._by_shape:
            # Code of its own: torch counts the compilations of one code object, and stops at eight.
            name = "_".join(["verify", *map(str, shape)])
            code = logits_of.__code__.replace(co_name=name)
            function = types.FunctionType(code, logits_of.__globals__, name)
            self._by_shape[shape] = torch.compile(function, fullgraph=True, backend=BACKEND)
        return self._by_shape[shape]


def let_capacity_vary(kv: RaggedKV) -> None:
    """Makes the compiler take the length of the storage for a variable from the start."""
    for tensor in (*kv.keys.values(), *kv.values.values()):
        torch._dynamo.maybe_mark_dynamic(tensor, 2)
