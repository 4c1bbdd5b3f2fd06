"""The one place where Python meets the compiled modules.

`cpu` and `cuda` are the compiled modules or None; `cpu_error` and `cuda_error` then say why.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch  # its OpenMP runtime must be loaded before ours asks for one

__all__ = ["cpu", "cpu_error", "cuda", "cuda_error", "num_threads"]


def _load(name: str, compiler: str) -> tuple[Any, str | None]:
    try:
        return importlib.import_module(f"specdec_kernels.{name}"), None
    except ModuleNotFoundError:
        return None, f"not built: no {compiler} was found when the package was installed"
    except ImportError as error:
        return None, f"built, but does not load: {error}"


cpu, cpu_error = _load("_cpu", "C++ compiler")
cuda, cuda_error = _load("_cuda", "CUDA compiler (nvcc 12.8 or newer)")
if cpu is not None and cpu.isa_request_refused():
    raise ImportError(
        "SPECDEC_CPU_ISA: expected baseline, avx2, avx512, avx512_bf16 or amx, supported by this machine "
        f"(best here: {cpu.isa()})"
    )


def num_threads() -> int:
    """Threads for CPU kernels: torch's own setting, so `torch.set_num_threads` governs both."""
    return torch.get_num_threads()
