"""Every Triton kernel compiles for every target, without spills and within its shared memory."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from compile_kernels import TARGETS, Kernel
from launches import LAUNCHES

from specdec_kernels import ops
from specdec_kernels.dispatch import IMPLEMENTATIONS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def compiled(target: str, *options: str) -> list[Kernel]:
    """By another process: the interpreter, where it is on, is for a whole process. Triton's cache
    keeps the results by the hash of the sources."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(ROOT / "build" / "triton")}
    environment.pop("TRITON_INTERPRET", None)
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), environment.get("PYTHONPATH")])
    )
    command = [sys.executable, HERE / "compile_kernels.py", target, *options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [Kernel(*fields) for fields in json.loads(run.stdout)]


def kernels_of_the_package() -> set[str]:
    """Names of what has the name of a kernel, in all triton*.py and _triton*.py of the ops."""
    names: set[str] = set()
    for module in pkgutil.walk_packages(ops.__path__, "specdec_kernels.ops."):
        if module.name.rpartition(".")[2].lstrip("_").startswith("triton"):
            names |= vars(importlib.import_module(module.name)).keys()
    return {name for name in names if name.startswith("_") and name.endswith("_kernel")}


@pytest.mark.parametrize("target", TARGETS)
def test_targets(target, request):
    every = ["--all"] if request.config.getoption("--all-configs") else []
    kernels = compiled(target, *every)
    faults = [fault for kernel in kernels for fault in kernel.faults(target)]
    assert not faults, "\n".join(faults)
    missing = kernels_of_the_package() - {kernel.name for kernel in kernels}
    assert not missing, f"launches.py reaches no {', '.join(sorted(missing))}"


def test_every_op_is_launched():
    assert {op for op, table in IMPLEMENTATIONS.items() if "triton" in table} == LAUNCHES.keys()


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_faults_are_found(target):
    launches = str(HERE / "faulty.py")
    faults: dict[str, str] = {}
    for kernel in compiled(target, "--launches", launches):
        faults[kernel.op] = "; ".join(kernel.faults(target))
    assert faults.pop("good") == ""
    assert ": spills " in faults.pop("spills")
    limit = TARGETS[target].chip.shared_memory
    assert f"bytes of shared memory, limit {limit}" in faults.pop("too_much_shared_memory")
    assert "NameError('missing is not defined')" in faults.pop("does_not_compile")
    assert not faults
