"""The model's linear layers through linear_small_m in verify forwards: where faster, or always.

Prefill keeps torch's layers, so that it is bit for bit that of plain generate, with one exception:
16-bit weights on a processor without 16-bit matrix units. There torch needs several times as long,
and 16-bit results are held to the near-tie rule anyway. `linear="auto"` finds out by measuring;
"invariant" decides by the processor, so that every run of a machine has the same prefill.
"""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from specdec_kernels import native
from specdec_kernels.dispatch import quickest, why_unavailable
from specdec_kernels.hf.forwards import (
    INVARIANT,
    MAX_ROWS,
    Forward,
    Replaced,
    active,
    may_replace,
)
from specdec_kernels.ops.linear_small_m import linear_small_m

MEASURED_ROWS = (1, 8, 16, 32, 64)
ROUNDS = 6
SAMPLE = 8
SECONDS_PER_SHAPE = 0.05
PREFILL_GAIN = 2.0

_measured: dict[tuple, tuple[float, ...]] = {}
_measure_lock = threading.Lock()


def linear_forwards(model: nn.Module, invariant: bool) -> Replaced:
    """The eligible linear layers: those that are faster by our kernel, or all and Conv1D too.

    Eligible: exactly nn.Linear, with plain dense CPU weights in a dtype that the kernel takes.
    Quantised, LoRA and hooked layers keep their own forward.
    """
    if not invariant:
        return [(m, _forward_of(m, gains)) for m, gains in choose(model)]
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and is_eligible(m)]
    return [
        *((m, _forward_of(m, None)) for m in linears),
        *((m, Conv1DForward(m)) for m in model.modules() if is_eligible(m, Conv1D)),
    ]


def _forward_of(module: nn.Linear, gains: tuple[float, ...] | None) -> Forward:
    """gains: torch's time over ours by MEASURED_ROWS; None when nothing was measured."""
    parameters: Any = module._parameters  # asking the module for them takes longer
    ours = [False] * (MAX_ROWS + 1)
    if gains is None:
        ours += [_torch_lacks_units_for(module.weight.dtype), True]
    else:
        for rows in range(1, MAX_ROWS + 1):
            ours[rows] = gains[_bucket(rows)] > 1.0
        ours += [module.weight.dtype != torch.float32 and gains[-1] >= PREFILL_GAIN, False]

    def forward(x: Tensor) -> Tensor:
        run = active.linear if ours[active.kind] else functional.linear
        return run(x, parameters["weight"], parameters["bias"])

    return forward


def _torch_lacks_units_for(dtype: torch.dtype) -> bool:
    """Whether torch emulates products of 16-bit numbers here: a rule that no load can sway."""
    if dtype == torch.bfloat16:
        return native.cpu.isa() not in ("avx512_bf16", "amx")
    return dtype == torch.float16


class Conv1DForward:
    """GPT-2's linear layer keeps [K, N]; a transposed copy of the weight serves the kernel.

    The copy is made anew for every generation: a weight may be changed without leaving a trace.
    """

    def __init__(self, module: Conv1D):
        self.module = weakref.ref(module)
        self.weight: Tensor | None = None

    def forget(self) -> None:
        self.weight = None

    def __call__(self, x: Tensor) -> Tensor:
        module = self.module()
        assert module is not None  # it is calling
        if active.kind != INVARIANT:
            return type(module).forward(module, x)
        weight = self.weight
        if weight is None:
            weight = self.weight = module.weight.detach().t().contiguous()
        return active.linear(x, weight, module.bias)


def choose(model: nn.Module) -> list[tuple[nn.Linear, tuple[float, ...]]]:
    """Eligible modules with torch's time over ours, per entry of MEASURED_ROWS, for that shape."""
    groups: dict[tuple, list[nn.Linear]] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear) and is_eligible(module):
            groups.setdefault(_shape_key(module), []).append(module)
    chosen: list[tuple[nn.Linear, tuple[float, ...]]] = []
    for key, modules in groups.items():
        with _measure_lock:
            if key not in _measured:
                _measured[key] = tuple(_gain(modules, rows) for rows in MEASURED_ROWS)
        if max(_measured[key]) > 1.0:
            chosen.extend((m, _measured[key]) for m in modules)
    return chosen


def is_eligible(module: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    if type(module) is not kind or not may_replace(module):
        return False
    weight: Any = module.weight
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and why_unavailable("cpu", "cpu") is None
    )


def _shape_key(module: nn.Linear) -> tuple:
    weight = module.weight
    return (*weight.shape, weight.dtype, module.bias is not None, torch.get_num_threads())


def _bucket(rows: int) -> int:
    return next(i for i, limit in enumerate(MEASURED_ROWS) if rows <= limit)


@torch.no_grad()
def _gain(modules: list[nn.Linear], rows: int) -> float:
    """Torch's time over ours: interleaved medians over some of the model's own, cold weights."""
    sample = modules[:SAMPLE]
    x = torch.zeros(rows, sample[0].in_features, dtype=sample[0].weight.dtype)
    run, ours, theirs = quickest(linear_small_m), [], []
    begun = time.perf_counter()
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for module in sample:
            functional.linear(x, module.weight, module.bias)
        middle = time.perf_counter()
        for module in sample:
            run(x, module.weight, module.bias)
        theirs.append(middle - started)
        ours.append(time.perf_counter() - middle)
        if time.perf_counter() - begun > SECONDS_PER_SHAPE:
            break
    warm = 1 if len(ours) > 1 else 0
    return statistics.median(theirs[warm:]) / statistics.median(ours[warm:])
