"""commit_kv_ against one index_copy_ per cache tensor and row, the way of a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.harness import Case, Options
from specdec_kernels.ops import commit_kv_
from specdec_kernels.ops.commit_kv import reference

DTYPE = torch.bfloat16
SLOTS = 512
MODELS = (
    {"model": "smollm2-135m", "layers": 30, "Hkv": 3, "D": 64},
    {"model": "8 K/V heads of 128", "layers": 16, "Hkv": 8, "D": 128},
)


class Inputs(NamedTuple):
    k: list[Tensor]
    v: list[Tensor]
    path: Tensor
    num_kept: Tensor
    prefix_len: Tensor
    target: list[Tensor]  # slots per row, for the rival
    source: list[Tensor]


def make(seed: int, shape: dict[str, Any]) -> Inputs:
    layers, batch, width, kept = (shape[key] for key in ("layers", "B", "T", "kept"))
    g = torch.Generator().manual_seed(seed)
    size = (batch, shape["Hkv"], SLOTS, shape["D"])
    caches = [torch.randn(size, generator=g).to(DTYPE) for _ in range(2 * layers)]
    path = torch.full((batch, width), -1, dtype=torch.int32)
    path[:, 0] = 0
    for row in path:
        chosen = torch.randperm(width - 1, generator=g)[: kept - 1].sort().values
        row[1:kept] = (chosen + 1).int()
    prefix_len = torch.randint(0, SLOTS - width, (batch,), generator=g, dtype=torch.int32)
    target = [int(p) + torch.arange(kept) for p in prefix_len]
    source = [int(p) + row[:kept].long() for p, row in zip(prefix_len, path, strict=True)]
    num_kept = torch.full((batch,), kept, dtype=torch.int32)
    return Inputs(caches[:layers], caches[layers:], path, num_kept, prefix_len, target, source)


def ours(x: Inputs) -> list[Tensor]:
    commit_kv_(x.k, x.v, x.path, x.num_kept, x.prefix_len)
    return [*x.k, *x.v]


def by_reference(x: Inputs) -> list[Tensor]:
    reference.commit_kv_(x.k, x.v, x.path, x.num_kept, x.prefix_len)
    return [*x.k, *x.v]


def index_copy(x: Inputs) -> list[Tensor]:
    for cache in [*x.k, *x.v]:
        for b, (target, source) in enumerate(zip(x.target, x.source, strict=True)):
            cache[b].index_copy_(1, target, cache[b].index_select(1, source))
    return [*x.k, *x.v]


def cases(options: Options) -> Iterable[Case]:
    for model in MODELS[:1] if options.quick else MODELS:
        for batch in (1, 4):
            shape: dict[str, Any] = {"T": 32, "B": batch, "dtype": "bf16", **model, "kept": 8}
            row = shape["Hkv"] * shape["D"] * DTYPE.itemsize
            yield Case(
                shape=shape,
                make=partial(make, shape=shape),
                run=ours,
                reference=by_reference,
                rivals={"index_copy": index_copy},
                bytes=2 * 2 * shape["layers"] * batch * row * (shape["kept"] - 1),
                in_place=True,
            )
