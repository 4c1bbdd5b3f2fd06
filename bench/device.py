"""A GPU as the suite uses it: recordings, a guard against synchronisation, timers, its limits.

Everything of the suite that needs torch.cuda is here, so that its tests can put a double in place.
"""

from __future__ import annotations

import contextlib
import datetime
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import specdec_kernels
from bench.harness import copy_of
from specdec_kernels.cli.machine import version_of
from specdec_kernels.cuda_graph import CudaGraph

COPIED = 1 << 30  # bytes of the buffer that shows the bandwidth


class CudaDevice:
    """One CUDA device. Raises RuntimeError, in a line, when there is none."""

    def __init__(self, name: str = "cuda"):
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device")
        self.device = torch.device(name)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(self.device)
        self.properties = torch.cuda.get_device_properties(self.device)
        self.capability = torch.cuda.get_device_capability(self.device)

    def facts(self) -> dict[str, Any]:
        return {
            "device": self.properties.name,
            "capability": ".".join(map(str, self.capability)),
            "memory_gib": round(self.properties.total_memory / 2**30),
            "l2_mib": round(self.cache_bytes() / 2**20),
            "driver": _driver(),
            "cuda": torch.version.cuda or torch.version.hip,
            "torch": torch.__version__,
            "triton": version_of("triton"),
            "specdec_kernels": specdec_kernels.__version__,
            "date": datetime.date.today().isoformat(),
        }

    def cache_bytes(self) -> int:
        return getattr(self.properties, "L2_cache_size", 64 << 20)

    def move(self, value: Any) -> Any:
        """The same values in tensors of this device, none of them shared."""
        return copy_of(value, self.device)

    def capture(self, call: Callable[[], Any]) -> CudaGraph:
        return CudaGraph(call, self.device)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, whatever waits for the device raises RuntimeError."""
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, call: Callable[[], Any]) -> float:
        """Of the device, from the beginning to the end of what `call` starts."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def copy_gb_per_s(self) -> float:
        """Bytes read and written by a large copy, the best of ten."""
        source = torch.ones(COPIED // 4, dtype=torch.int32, device=self.device)
        target: Tensor = torch.empty_like(source)
        best = min(self.seconds(lambda: target.copy_(source)) for _ in range(10))
        return 2 * COPIED / best / 1e9


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None
