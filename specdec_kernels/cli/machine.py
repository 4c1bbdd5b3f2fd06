"""What this machine is: the line that belongs under every measured number."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from typing import Any

import torch

from specdec_kernels import __version__, native

# How /proc/cpuinfo spells the instruction sets that matter here, widest last.
FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_bf16")


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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


def describe() -> dict[str, Any]:
    """The machine as a dictionary; "line" is the same in one line of text."""
    cpu, flags = cpu_info()
    facts = {
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "isa": isa_in_use(),
        "cpu_flags": flags,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version_of("transformers"),
        "specdec_kernels": __version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    facts["line"] = (
        f"{cpu}, kernels: {facts['isa']}, {facts['threads']} threads, torch {facts['torch']}, "
        f"transformers {facts['transformers']}, specdec-kernels {__version__}, {facts['date']}"
    )
    return facts
