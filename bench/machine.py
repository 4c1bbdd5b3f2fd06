"""What a number means nothing without: the machine, the versions, the sizes of its caches."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

import specdec_kernels
from specdec_kernels import native

CPU_FILES = Path("/sys/devices/system/cpu/cpu0/cache")


@cache
def last_level_cache() -> int:
    """Bytes of the largest cache of CPU 0; 32 MiB when the system doesn't tell."""
    sizes = [0]
    for file in CPU_FILES.glob("index*/size"):
        text = file.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * unit)
    return max(sizes) or 32 << 20


def usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def transformers_version() -> str | None:
    """None when it cannot be imported; asking does not import it, which takes seconds."""
    if importlib.util.find_spec("transformers") is None:
        return None
    return importlib.metadata.version("transformers")


@cache
def cpu_name() -> str:
    """The name of the first CPU, with family and model where the system tells them."""
    facts: dict[str, str] = {}
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    name = facts.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in facts:
        name += f" (family {facts['cpu family']}, model {facts.get('model', '?')})"
    return name


def load() -> float | None:
    """Processes that ran or wanted to run in the last minute."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": usable_cpus(),
        "isa": native.cpu.isa() if native.cpu is not None else None,
        "cache_mib": last_level_cache() / (1 << 20),
        "load": load(),
        "torch": torch.__version__,
        "transformers": transformers_version(),
        "specdec_kernels": specdec_kernels.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def machine_line() -> str:
    m = machine()
    return (
        f"{m['cpu']}, {m['cores']} cores, {m['cache_mib']:.0f} MiB cache, "
        f"{torch.get_num_threads()} threads, kernels: {m['isa'] or 'none compiled'}; "
        f"specdec-kernels {m['specdec_kernels']}, torch {m['torch']}, "
        f"transformers {m['transformers'] or 'missing'}, Python {m['python']}, {m['system']}"
    )
