"""Calls of every op's Triton launcher that make it launch all its kernels.

LAUNCHES: op to a function that returns calls without arguments. The calls of `every=False` are one
of each kernel in the shapes of a common model; those of `every=True` reach every configuration that
the launcher can choose. Nothing is computed, so contents do not matter: alignment and sizes do.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def launcher(op: str) -> Callable:
    folder = op.rstrip("_")
    return getattr(importlib.import_module(f"specdec_kernels.ops.{folder}.triton"), folder)


def int32(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int32)


def int64(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int64)


def commit_kv_(every: bool) -> Iterator[Call]:
    run = launcher("commit_kv_")
    layers, batch, slots = 2, 2, 32
    row = (int32(batch, 16), int32(batch), int32(batch))
    for dtype in DTYPES if every else DTYPES[:1]:
        for heads, dim in ((8, 128), (3, 64), (1, 80), (32, 256), (2, 9)) if every else ((8, 128),):
            dense = [torch.empty(batch, heads, slots, dim, dtype=dtype) for _ in range(layers)]
            yield functools.partial(run, dense, dense, *row)
            paged = [torch.empty(4, 16, heads, dim, dtype=dtype) for _ in range(layers)]
            yield functools.partial(run, paged, paged, *row, int32(batch, 2))


LAUNCHES: dict[str, Callable[[bool], Iterator[Call]]] = {
    "commit_kv_": commit_kv_,
}
