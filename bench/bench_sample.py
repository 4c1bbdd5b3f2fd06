"""sample against PyTorch: one token a row, without and with truncation."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import torch_sampling, windows
from bench.harness import Case, Options
from specdec_kernels.ops import sample
from specdec_kernels.ops._random import STREAMS
from specdec_kernels.ops.sample import reference
from specdec_kernels.tree import SamplingParams

SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.9},
)


class Inputs(NamedTuple):
    logits: Tensor  # [B, V]
    sampling: SamplingParams


def make(seed: int, shape: dict[str, Any]) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(shape["B"], shape["V"], generator=g).mul_(windows.SPREAD)
    dtype = windows.DTYPES[shape["dtype"]]
    return Inputs(logits.to(dtype), windows.sampling_of(shape, shape["B"], seed))


def ours(x: Inputs) -> Tensor:
    return sample(x.logits, x.sampling)


def by_reference(x: Inputs) -> Tensor:
    return reference.sample(x.logits, x.sampling, STREAMS["bonus"])


def torch_batched(x: Inputs, settings: dict[str, Any]) -> Tensor:
    return torch_sampling.sample(x.logits, settings)


def in_kept_set(got: Tensor, expected: Tensor, x: Inputs) -> None:
    assert got.shape == expected.shape, "other shape"
    kept = reference.prepare(x.logits, *x.sampling[:4]).kept
    assert bool(kept.gather(1, got.unsqueeze(1)).all()), "drew a token outside the kept set"


def operations(case: dict[str, Any]) -> int:
    return windows.draw_operations(case["B"], case["V"])


def shapes(quick: bool) -> Iterable[dict[str, Any]]:
    for batch, vocab in (1, 49152), (8 if quick else 32, 151936):
        for dtype in ("bf16",) if quick else ("bf16", "fp32"):
            for settings in SETTINGS:
                yield {"B": batch, "V": vocab, "dtype": dtype, **settings}


def cases(options: Options) -> Iterable[Case]:
    for shape in shapes(options.quick):
        yield Case(
            shape=shape,
            make=partial(make, shape=shape),
            run=ours,
            reference=by_reference,
            rivals={"torch_batched": partial(torch_batched, settings=shape)},
            bytes=shape["B"] * shape["V"] * windows.DTYPES[shape["dtype"]].itemsize,
            check_rival=in_kept_set,
            operations=None if {"top_k", "top_p"} & shape.keys() else operations,
        )
