"""Which CPU this is, and what our kernels use of it."""

from __future__ import annotations

import platform

from specdec_kernels import native

# How /proc/cpuinfo spells the instruction sets that matter here, widest last.
FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_bf16")


def cpu_info() -> tuple[str, list[str]]:
    """The CPU's name and those of FLAGS it has; on systems without /proc, what platform knows."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return platform.processor() or platform.machine(), []
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip().lower(), value.strip())
    flags = fields.get("flags", fields.get("features", "")).split()
    name = fields.get("model name") or platform.machine()
    if "cpu family" in fields and "model" in fields:
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return name, [flag for flag in FLAGS if flag in flags]


def isa_in_use() -> str:
    """The instruction set our kernels run with, or "reference" without a compiled module."""
    return native.cpu.isa() if native.cpu is not None else "reference"
