"""Which backends a kernel's tests run."""

from __future__ import annotations

from specdec_kernels import ops  # noqa: F401  registers them
from specdec_kernels.dispatch import IMPLEMENTATIONS, why_unavailable


def backends(op: str) -> list[str]:
    """Those that run on CPU tensors here: the reference, the compiled one, and in
    `make test-gpu-code` also triton (interpreted) and cuda (emulated)."""
    return [b for b in IMPLEMENTATIONS[op] if why_unavailable(b, "cpu") is None]
