"""The model's linear layers through linear_small_m in verify forwards: where faster, or always.

Prefill keeps torch's layers, so that it is bit for bit that of plain generate, with one exception:
16-bit weights on a processor without 16-bit matrix units. There torch needs several times as long,
and 16-bit results are held to the near-tie rule anyway. `linear="auto"` finds out by measuring;
"invariant" decides by the processor, so that every run of a machine has the same prefill.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from specdec_kernels import native
from specdec_kernels.dispatch import why_unavailable
from specdec_kernels.hf.invariant import RowWise, Survey, by_rows, is_elementwise
from specdec_kernels.ops.linear_small_m import linear_small_m, quickest

MAX_ROWS = 64
MEASURED_ROWS = (1, 8, 16, 32, 64)
ROUNDS = 6
SAMPLE = 8
SECONDS_PER_SHAPE = 0.05
PREFILL_GAIN = 2.0

# What kind of forward this thread runs: a verify forward of 1..MAX_ROWS rows, or one of these.
OTHER, PREFILL, INVARIANT = 0, MAX_ROWS + 1, MAX_ROWS + 2


class _Active(threading.local):
    kind: int = OTHER
    held: LinearFlip | None = None
    kernel: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(linear_small_m)


_active = _Active()
_flip_lock = threading.Lock()
_users: dict[int, int] = {}  # by id of the module: forwards that run through our flip
_measured: dict[tuple, tuple[float, ...]] = {}
_measure_lock = threading.Lock()


Forward = Callable[..., Any]
Replaced = list[tuple[nn.Module, Forward]]
Treated = dict[nn.Module, Forward]


class LinearFlip:
    """Gives eligible linear modules a `forward` of ours while verify forwards run.

    Eligible: exactly nn.Linear, with plain dense CPU weights in a dtype that the kernel takes.
    Quantised, LoRA and hooked layers keep their own forward. Other threads that run a module while
    it is flipped get the ordinary one. Flips of one module are counted, whoever made them.

    invariant: all eligible ones and Conv1D too, whatever is faster, and also the modules that
        `treat` was told of.
    """

    def __init__(self, model: nn.Module, *, invariant: bool = False):
        self.invariant = invariant
        self._modules: Replaced | None = None
        self._treated: Treated = {}
        self._model = weakref.ref(model)

    def verify(self, rows: int) -> contextlib.AbstractContextManager[None]:
        if self.invariant:
            return self._flipped(INVARIANT)
        return self._flipped(rows if rows <= MAX_ROWS else OTHER)

    def prefill(self) -> contextlib.AbstractContextManager[None]:
        return self._flipped(PREFILL)

    def treat(self, survey: Survey) -> list[str]:
        """Takes the uneven modules of a forward in hand; what cannot be helped, for a warning."""
        model = self._model()
        names = {} if model is None else {m: name for name, m in model.named_modules()}
        hopeless = []
        for module, operations, uneven in survey.uneven():
            if module in self._treated:
                continue
            shown = f"{names.get(module) or 'the model'} ({type(module).__name__})"
            if "unknown" in uneven:
                hopeless.append(f"{shown} runs {', '.join(sorted(uneven['unknown']))}")
            elif module is None or module is model or not _may_replace(module):
                products = sorted(set().union(*uneven.values()))
                hopeless.append(f"{shown} keeps its own forward, with {', '.join(products)}")
            else:
                self._treated = {**self._treated, **_treatment(model, module, operations)}
        return hopeless

    def _replacements(self, model: nn.Module) -> Replaced:
        if not self.invariant:
            return [(m, _forward_of(m, gains)) for m, gains in choose(model)]
        linears = [m for m in model.modules() if isinstance(m, nn.Linear) and is_eligible(m)]
        return [
            *((m, _forward_of(m, None)) for m in linears),
            *((m, _Conv1DForward(m)) for m in model.modules() if is_eligible(m, Conv1D)),
        ]

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Leaves the modules flipped, but idle, between this thread's forwards: there are many."""
        with _installed(self._linears()):
            outer, _active.held = _active.held, self
            try:
                yield
            finally:
                _active.held = outer

    @contextlib.contextmanager
    def _flipped(self, kind: int) -> Iterator[None]:
        linears = self._linears()
        if kind == PREFILL:
            for _, forward in linears:
                if isinstance(forward, _Conv1DForward):
                    forward.forget()
        replaced = [*([] if _active.held is self else linears), *self._treated.items()]
        with _installed(replaced):
            _active.kernel = quickest()
            _active.kind = kind
            try:
                yield
            finally:
                _active.kind = OTHER

    def _linears(self) -> Replaced:
        with _flip_lock:
            model = self._model()
            if self._modules is None and model is not None:
                self._modules = self._replacements(model)
            return self._modules or []


@contextlib.contextmanager
def _installed(replaced: Replaced) -> Iterator[None]:
    with _flip_lock:
        for module, forward in replaced:
            if id(module) not in _users:
                module.__dict__["forward"] = forward
            _users[id(module)] = _users.get(id(module), 0) + 1
    try:
        yield
    finally:
        with _flip_lock:
            for module, _ in replaced:
                _users[id(module)] -= 1
                if _users[id(module)] == 0:
                    del _users[id(module)], module.__dict__["forward"]


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
        run = _active.kernel if ours[_active.kind] else functional.linear
        return run(x, parameters["weight"], parameters["bias"])

    return forward


def _torch_lacks_units_for(dtype: torch.dtype) -> bool:
    """Whether torch emulates products of 16-bit numbers here: a rule that no load can sway."""
    if dtype == torch.bfloat16:
        return native.cpu.isa() not in ("avx512_bf16", "amx")
    return dtype == torch.float16


class _Conv1DForward:
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
        if _active.kind != INVARIANT:
            return type(module).forward(module, x)
        weight = self.weight
        if weight is None:
            weight = self.weight = module.weight.detach().t().contiguous()
        return _active.kernel(x, weight, module.bias)


def _treatment(model: nn.Module | None, module: nn.Module, operations: set[str]) -> Treated:
    """For a module and all of its class: which experts a forward runs depends on its tokens."""
    alike = [] if model is None else [m for m in model.modules() if type(m) is type(module)]
    return {
        m: _invariant_forward(m, is_elementwise(m, operations))
        for m in (module, *alike)
        if _has_forward_of_its_class(m)
    }


def _invariant_forward(module: nn.Module, elementwise: bool) -> Forward:
    original = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if _active.kind != INVARIANT:
            return original(module, *args, **kwargs)
        if elementwise and len(args) == 1 and not kwargs:
            return by_rows(functools.partial(original, module), args[0])
        with RowWise():
            return original(module, *args, **kwargs)

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


def _may_replace(module: nn.Module) -> bool:
    """Not a linear layer that was not eligible, nor a forward that others put on the instance."""
    return not isinstance(module, nn.Linear) and _has_forward_of_its_class(module)


def _has_forward_of_its_class(module: nn.Module) -> bool:
    return "forward" not in module.__dict__ or id(module) in _users


def is_eligible(module: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    if type(module) is not kind or not _has_forward_of_its_class(module):
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
    run, ours, theirs = quickest(), [], []
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
