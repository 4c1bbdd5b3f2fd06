"""The one place where a backend is chosen: reference | cpu | triton | cuda.

Order: an explicit `backend=`, the `use_backend` context, the variable SPECDEC_BACKEND as it was
when the package was imported, else the first implementation of the op that suits the tensors'
device. On CUDA tensors that is the first of GPU_BACKENDS that has passed its suite on the device,
else the reference. An explicit choice never falls back.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from specdec_kernels import native
from specdec_kernels.proven import is_proven

BACKENDS = ("reference", "cpu", "triton", "cuda")
GPU_BACKENDS = ("cuda", "triton")  # best first
LIBRARY = torch.library.Library("specdec_kernels", "DEF")
# Of every op: backend to function, best first.
IMPLEMENTATIONS: dict[str, Mapping[str, Callable]] = {}
# Read once: between long computations a look into os.environ takes as long as a small kernel.
_FROM_ENVIRONMENT = os.environ.get("SPECDEC_BACKEND", "")


class _Local(threading.local):
    backend: str | None = None


_local = _Local()


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Every op called in this thread inside the context runs on backend `name`."""
    if name not in BACKENDS:
        raise ValueError(f"use_backend: expected one of {', '.join(BACKENDS)}, got {name!r}")
    previous = _local.backend
    _local.backend = name
    try:
        yield
    finally:
        _local.backend = previous


def asked_for() -> str:
    """The backend that the context or the environment asks for; empty when neither does."""
    return _local.backend or _FROM_ENVIRONMENT


def why_unavailable(backend: str, device_type: str) -> str | None:
    """None when `backend` can run on tensors of `device_type`, else the reason."""
    if backend == "reference":
        return None
    if backend == "cpu":
        if device_type != "cpu":
            return f"takes CPU tensors, got {device_type}"
        return None if native.cpu is not None else native.cpu_error
    emulated = native.triton_interprets if backend == "triton" else native.cuda_is_emulated
    if device_type != ("cpu" if emulated else "cuda"):
        return f"takes {'CPU' if emulated else 'CUDA'} tensors, got {device_type}"
    return native.triton_error if backend == "triton" else native.cuda_error


def pick(
    op: str, implementations: Mapping[str, Callable], device_type: str, explicit: str | None
) -> Callable:
    """The implementation to call; `implementations` maps backend to function, best first."""
    wanted = explicit or asked_for()
    if not wanted:
        for backend, function in implementations.items():
            if why_unavailable(backend, device_type) is None:
                return function
    available = [b for b in implementations if why_unavailable(b, device_type) is None]
    if wanted not in implementations:
        raise RuntimeError(
            f"{op}: no backend {wanted!r} (available here: {', '.join(available) or 'none'})"
        )
    reason = why_unavailable(wanted, device_type)
    if reason is not None:
        raise RuntimeError(
            f"{op}: backend {wanted!r} is not available: {reason} "
            f"(available here: {', '.join(available) or 'none'})"
        )
    return implementations[wanted]


def default_on(op: str, device: torch.device) -> str:
    """The backend of `op` that runs on CUDA tensors when none is asked for."""
    for backend in GPU_BACKENDS:
        if (
            backend in IMPLEMENTATIONS[op]
            and why_unavailable(backend, device.type) is None
            and is_proven(op, backend, device)
        ):
            return backend
    return "reference"


@functools.cache
def _default_implementation(op: str, device: torch.device) -> Callable:
    return IMPLEMENTATIONS[op][default_on(op, device)]


def triton_kernel(op: str) -> Callable:
    """What `specdec_kernels/ops/OP/triton.py` calls OP: imported at the first call, as Triton is
    optional and slow to import."""

    def run(*args: Any) -> Any:
        return getattr(importlib.import_module(f"specdec_kernels.ops.{op}.triton"), op)(*args)

    return run


def register(
    name: str, schema: str, implementations: Mapping[str, Callable], fake: Callable
) -> Callable:
    """Defines `torch.ops.specdec_kernels.name` and returns what the public function calls.

    `schema` ends in the argument `str backend`, which is resolved here.
    """
    LIBRARY.define(f"{name}{schema}")
    IMPLEMENTATIONS[name] = implementations

    def run_on_cpu(*args: Any, backend: str = "") -> Any:
        return pick(name, implementations, "cpu", backend)(*args)

    def run_on_cuda(*args: Any, backend: str = "") -> Any:
        if backend or asked_for():
            return pick(name, implementations, "cuda", backend)(*args)
        first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
        return _default_implementation(name, first.device)(*args)

    LIBRARY.impl(name, run_on_cpu, "CPU")
    LIBRARY.impl(name, run_on_cuda, "CUDA")

    def fake_without_backend(*args: Any, backend: str = "", **kwargs: Any) -> Any:
        return fake(*args, **kwargs)

    torch.library.register_fake(f"specdec_kernels::{name}", fake_without_backend, lib=LIBRARY)
    overload = getattr(torch.ops.specdec_kernels, name).default
    mutates = any(a.alias_info is not None for a in overload._schema.arguments)
    return overload if mutates else _shortcut(overload, implementations)


def undisturbed(first: Any, backend: str | None) -> bool:
    """Whether a CPU kernel may be called at once, without torch's dispatcher: on a plain tensor,
    outside of compilation, dispatch modes and profiles, when no other backend is asked for.

    The dispatcher costs up to 6 us, but 60 us when a long computation has emptied the caches.
    """
    return (
        not torch.compiler.is_dynamo_compiling()
        and native.cpu is not None
        and type(first) is torch.Tensor
        and (backend or asked_for() or "cpu") == "cpu"
        and not is_in_torch_dispatch_mode()
        and not torch.autograd._profiler_enabled()
    )


def quickest(op: Callable) -> Callable:
    """A public op for many calls in a row, without gradients, as things stand now: what an op asks
    at every call, who listens and for how many threads, takes as long as a small layer.

    Takes all of the op's arguments but `backend`, by position, those with defaults too.
    """
    if not undisturbed(_ANY, None):
        return op
    kernel, num_threads = getattr(native.cpu, op.__name__), native.num_threads()

    def run(*args: Any) -> Any:
        try:
            return kernel(*args, num_threads)
        except (TypeError, ValueError):
            return op(*args)  # copies what has other strides, or says what is wrong

    return run


_ANY = torch.empty(0)


def _shortcut(overload: Any, implementations: Mapping[str, Callable]) -> Callable:
    """Calls `overload`, or its CPU implementation at once."""

    def call(first: Any, *args: Any, backend: str | None = None) -> Any:
        if undisturbed(first, backend) and first.is_cpu:
            return implementations["cpu"](first, *args)
        return overload(first, *args, backend=backend or "")

    return call
