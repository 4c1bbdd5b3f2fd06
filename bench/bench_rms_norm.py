"""rms_norm against the eight operations of a model's own norm, in turns over many cold inputs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.harness import Case, Options
from specdec_kernels.ops import rms_norm
from specdec_kernels.ops.rms_norm import reference

EPS = 1e-5


class Inputs(NamedTuple):
    x: Tensor  # [rows, D]
    weight: Tensor


def make(seed: int, shape: dict[str, Any], dtype: torch.dtype) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape["M"], shape["D"], generator=g)
    return Inputs(x.to(dtype), torch.rand(shape["D"], generator=g).to(dtype))


def by_reference(x: Inputs) -> Tensor:
    return reference.rms_norm(x.x, x.weight, EPS)


def cases(options: Options) -> Iterable[Case]:
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        for dim in (576,) if options.quick else (576, 4096):
            for rows in (1, 9, 64):
                shape: dict[str, Any] = {"M": rows, "D": dim, "dtype": name}
                yield Case(
                    shape=shape,
                    make=partial(make, shape=shape, dtype=dtype),
                    run=lambda x: rms_norm(x.x, x.weight, EPS),
                    reference=by_reference,
                    rivals={"torch_batched": by_reference},
                    bytes=(2 * rows + 1) * dim * dtype.itemsize,
                )
