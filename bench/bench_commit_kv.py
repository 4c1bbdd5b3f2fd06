"""commit_kv_ against one index_copy_ per cache tensor, the way of a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bench.harness import Case
from specdec_kernels.ops import commit_kv_
from specdec_kernels.ops.commit_kv import reference

DTYPE = torch.bfloat16


class Inputs(NamedTuple):
    k: list[Tensor]
    v: list[Tensor]
    path: Tensor
    num_kept: Tensor
    prefix_len: Tensor
    target: list[Tensor]  # slots per row, for the rival
    source: list[Tensor]


def make(
    seed: int, *, layers: int, batch: int, heads: int, dim: int, width: int, kept: int
) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    slots = 512
    caches = [
        torch.randn(batch, heads, slots, dim, generator=g, dtype=torch.float32).to(DTYPE)
        for _ in range(2 * layers)
    ]
    path = torch.full((batch, width), -1, dtype=torch.int32)
    path[:, 0] = 0
    for row in path:
        chosen = torch.randperm(width - 1, generator=g)[: kept - 1].sort().values
        row[1:kept] = (chosen + 1).int()
    prefix_len = torch.randint(0, slots - width, (batch,), generator=g, dtype=torch.int32)
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


def cases(quick: bool) -> Iterable[Case]:
    models = [("30 layers, 3 heads of 64", 30, 3, 64)]
    if not quick:
        models.append(("16 layers, 8 heads of 128", 16, 8, 128))
    for name, layers, heads, dim in models:
        for batch in (1, 4):
            width, kept = 32, 8
            yield Case(
                name=f"{name}, B={batch}, T={width}, {kept} kept",
                make=partial(
                    make, layers=layers, batch=batch, heads=heads, dim=dim, width=width, kept=kept
                ),
                run=ours,
                reference=by_reference,
                rivals={"index_copy_": index_copy},
                bytes=2 * 2 * layers * batch * heads * dim * (kept - 1) * DTYPE.itemsize,
            )
