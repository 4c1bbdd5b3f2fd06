"""The one place where Python meets the compiled modules.

`cpu` and `cuda` are the compiled modules or None; `cpu_error` and `cuda_error` then say why.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
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


def _is_command() -> bool:
    """Whether `specdec`, or `python -m specdec_kernels`, was typed."""
    if sys.argv[:1] == ["-m"]:  # while Python still looks for the module
        return "specdec_kernels" in sys.orig_argv
    return bool(sys.argv) and Path(sys.argv[0]).stem == "specdec"


cpu, cpu_error = _load("_cpu", "C++ compiler")
cuda, cuda_error = _load("_cuda", "CUDA compiler (nvcc 12.8 or newer)")
if cpu is not None and cpu.isa_request_refused():
    _refused = (
        "SPECDEC_CPU_ISA: expected baseline, avx2, avx512, avx512_bf16 or amx, supported by this "
        f"machine (best here: {cpu.isa()})"
    )
    if _is_command():  # its errors are a line, not a traceback, and nothing is there to catch one
        print(f"specdec: {_refused}", file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(_refused)


def num_threads() -> int:
    """Threads for CPU kernels: torch's own setting, so `torch.set_num_threads` governs both."""
    return torch.get_num_threads()
