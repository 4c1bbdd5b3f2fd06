"""What this machine is: the line that belongs under every measured number."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from typing import Any

import torch

from specdec_kernels import __version__
from specdec_kernels.cpu import cpu_info, isa_in_use


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


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
