"""linear_small_m against torch.nn.functional.linear: every linear layer of SmolLM2-135M in a row,
as a verify forward calls them, each with a weight of its own so that weights come from memory, and
the shapes one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from bench.harness import Case, Options
from specdec_kernels.dispatch import quickest
from specdec_kernels.ops import linear_small_m
from specdec_kernels.ops.linear_small_m import reference

MODEL = "smollm2-135m"
LAYERS = 30
LAYER = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))
HEAD = (49152, 576)
ROWS = (1, 4, 8, 9, 16, 32, 64)
SHAPE_ROWS = (1, 9, 32)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Inputs(NamedTuple):
    weights: list[Tensor]  # [N, K] each
    x: dict[int, Tensor]  # [M, K] by K


def make(seed: int, shapes: list[tuple[int, int]], rows: int, dtype: torch.dtype) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    weights = [torch.randn(shape, generator=g).to(dtype) for shape in shapes]
    depths = sorted({depth for _, depth in shapes})
    return Inputs(weights, {k: torch.randn(rows, k, generator=g).to(dtype) for k in depths})


def apply(function: Callable[[Tensor, Tensor, None], Tensor], inputs: Inputs) -> list[Tensor]:
    """All layers; of layers of one shape the last result is kept."""
    results = {w.shape: function(inputs.x[w.shape[1]], w, None) for w in inputs.weights}
    return list(results.values())


def ours(inputs: Inputs) -> list[Tensor]:
    return apply(quickest(linear_small_m) if len(inputs.weights) > 1 else linear_small_m, inputs)


def close(got: list[Tensor], expected: list[Tensor]) -> None:
    for mine, right in zip(got, expected, strict=True):
        tolerance = float(right.abs().max()) * (1e-5 if right.dtype == torch.float32 else 2**-7)
        torch.testing.assert_close(mine, right, rtol=0.0, atol=tolerance)


def case(
    shape: dict[str, Any], layers: list[tuple[int, int]], rows: int, dtype: torch.dtype
) -> Case:
    elements = sum(n * k + rows * (n + k) for n, k in layers)
    return Case(
        shape=shape,
        make=partial(make, shapes=layers, rows=rows, dtype=dtype),
        run=ours,
        reference=partial(apply, reference.linear_small_m),
        rivals={"torch_linear": partial(apply, linear)},
        bytes=elements * dtype.itemsize,
        flops=2 * rows * sum(n * k for n, k in layers),
        reads=lambda x: x.weights,
        check=close,
    )


def cases(options: Options) -> Iterable[Case]:
    everything = [*LAYER * LAYERS, HEAD]
    for name, dtype in DTYPES.items():
        for rows in (1, 9, 32) if options.quick else ROWS:
            shape: dict[str, Any] = {"model": MODEL, "M": rows, "dtype": name}
            yield case(shape, everything, rows, dtype)
        for n, k in sorted({*LAYER, HEAD}):
            for rows in (9,) if options.quick else SHAPE_ROWS:
                shape = {"M": rows, "K": k, "N": n, "dtype": name}
                yield case(shape, [(n, k)], rows, dtype)
