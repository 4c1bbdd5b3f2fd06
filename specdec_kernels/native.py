"""The one place where Python meets the compiled modules and Triton.

`cpu` and `cuda` are the compiled modules or None; `cpu_error`, `cuda_error` and `triton_error` say
why there is none. Tests run the GPU kernels on CPU tensors: `triton_interprets` under Triton's
interpreter, `cuda_is_emulated` in a build of the CUDA module for the CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch  # its OpenMP runtime must be loaded before ours asks for one

__all__ = [
    "cpu",
    "cpu_error",
    "cuda",
    "cuda_error",
    "cuda_is_emulated",
    "cuda_launch",
    "num_threads",
    "triton_error",
    "triton_interprets",
]


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
cuda, cuda_error = _load("_cuda", "GPU with nvcc 12.8 or newer")
cuda_is_emulated = getattr(cuda, "is_emulated", False)
triton_error = None if importlib.util.find_spec("triton") else "triton is not installed"
triton_interprets = triton_error is None and os.environ.get("TRITON_INTERPRET") == "1"
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


def cuda_launch(like: torch.Tensor) -> tuple[int, int]:
    """Device index and current stream for a CUDA kernel on the device of `like`."""
    if like.is_cpu:
        return 0, 0
    return like.device.index, torch.cuda.current_stream(like.device).cuda_stream
