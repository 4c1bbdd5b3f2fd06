"""The model's linear layers through linear_small_m, in verify forwards, where that is faster.

Prefill keeps torch's layers, so that it is bit for bit that of plain generate, with one exception:
16-bit weights on a processor without 16-bit matrix units. There torch needs several times as long,
and 16-bit results are held to the near-tie rule anyway.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec_kernels.dispatch import why_unavailable
from specdec_kernels.ops.linear_small_m import linear_small_m

MAX_ROWS = 64
MEASURED_ROWS = (1, 8, 16, 32, 64)
ROUNDS = 6
SAMPLE = 8
SECONDS_PER_SHAPE = 0.05
PREFILL_GAIN = 2.0

_active = threading.local()  # .mode is "verify", "prefill" or absent
_flip_lock = threading.Lock()
_users: dict[int, int] = {}  # by id of the module: forwards that run through our flip
_measured: dict[tuple, tuple[float, ...]] = {}
_measure_lock = threading.Lock()


class LinearFlip:
    """Gives eligible nn.Linear modules a `forward` of ours while verify forwards run.

    Eligible: exactly nn.Linear, with plain dense CPU weights in a dtype that the kernel takes.
    Quantised, LoRA and hooked layers keep their own forward. Other threads that run a module while
    it is flipped get the ordinary linear. Flips of one module are counted, whoever made them.
    """

    def __init__(self, model: nn.Module):
        self._modules: list[tuple[nn.Linear, Any]] | None = None
        self._model = weakref.ref(model)

    def verify(self) -> contextlib.AbstractContextManager[None]:
        return self._flipped("verify")

    def prefill(self) -> contextlib.AbstractContextManager[None]:
        return self._flipped("prefill")

    @contextlib.contextmanager
    def _flipped(self, mode: str) -> Iterator[None]:
        with _flip_lock:
            model = self._model()
            if self._modules is None and model is not None:
                self._modules = [(m, _forward_of(m, gains)) for m, gains in choose(model)]
            modules = self._modules or []
            for module, forward in modules:
                if id(module) not in _users:
                    module.__dict__["forward"] = forward
                _users[id(module)] = _users.get(id(module), 0) + 1
        _active.mode = mode
        try:
            yield
        finally:
            _active.mode = None
            with _flip_lock:
                for module, _ in modules:
                    _users[id(module)] -= 1
                    if _users[id(module)] == 0:
                        del _users[id(module)], module.__dict__["forward"]


def _forward_of(module: nn.Linear, gains: tuple[float, ...]) -> Any:
    in_prefill = module.weight.dtype != torch.float32 and gains[-1] >= PREFILL_GAIN

    def forward(x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        mode = getattr(_active, "mode", None)
        ours = (mode == "verify" and rows <= MAX_ROWS and gains[_bucket(rows)] > 1.0) or (
            mode == "prefill" and in_prefill
        )
        if not ours:
            return functional.linear(x, module.weight, module.bias)
        out = linear_small_m(x.reshape(rows, x.shape[-1]), module.weight, module.bias)
        return out.view(*x.shape[:-1], out.shape[-1])

    return forward


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


def is_eligible(module: nn.Module) -> bool:
    if type(module) is not nn.Linear:
        return False
    if "forward" in module.__dict__ and id(module) not in _users:
        return False
    weight = module.weight
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
    ours, theirs = [], []
    begun = time.perf_counter()
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for module in sample:
            functional.linear(x, module.weight, module.bias)
        middle = time.perf_counter()
        for module in sample:
            linear_small_m(x, module.weight, module.bias)
        theirs.append(middle - started)
        ours.append(time.perf_counter() - middle)
        if time.perf_counter() - begun > SECONDS_PER_SHAPE:
            break
    warm = 1 if len(ours) > 1 else 0
    return statistics.median(theirs[warm:]) / statistics.median(ours[warm:])
