"""Compiles the Triton kernels for one target, with no GPU: python compile_kernels.py gfx942 [--all]

Runs the launchers of launches.py on CPU tensors, with Triton's driver replaced by one that names
the target: each kernel that they launch is compiled exactly as it would be there, and not run.
Prints a JSON list of Kernel fields. `--launches FILE` takes the launches of another file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from specdec_kernels.ops import _triton
from specdec_kernels.ops._triton import Chip


class Target(NamedTuple):
    target: GPUTarget
    chip: Chip


# Sizes of an A100, H200, B200, RTX PRO 6000 Blackwell, MI300X and MI355X.
TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), Chip("cuda", 80, 108, 166912)),
    "sm_90": Target(GPUTarget("cuda", 90, 32), Chip("cuda", 90, 132, 232448)),
    "sm_100": Target(GPUTarget("cuda", 100, 32), Chip("cuda", 100, 148, 232448)),
    "sm_120": Target(GPUTarget("cuda", 120, 32), Chip("cuda", 120, 188, 101376)),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), Chip("hip", 0, 304, 65536)),
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), Chip("hip", 0, 256, 163840)),
}


class Kernel(NamedTuple):
    """One compiled kernel: its resources, or the error that its launch raised.

    spilled: bytes of stack per thread on NVIDIA, which holds spills and nothing else of ours;
        vector registers, and bytes of scratch beside them, on AMD.
    """

    op: str
    name: str
    constants: str
    registers: int = 0
    spilled: int = 0
    shared_memory: int = 0
    error: str = ""

    def faults(self, target: str) -> Iterator[str]:
        where = f"{target} {self.op} {self.name} {self.constants}"
        limit = TARGETS[target].chip.shared_memory
        if self.error:
            yield f"{where}: {self.error}"
        if self.spilled:
            yield f"{where}: spills {self.spilled}, with {self.registers} registers"
        if self.shared_memory > limit:
            yield f"{where}: {self.shared_memory} bytes of shared memory, limit {limit}"


class NamesTheTarget:
    """In place of Triton's driver."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(compiled: Any) -> dict[str, int]:
    shared = compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]

        def number(key: str) -> int:
            return int(re.search(rf"\.{key}:\s*(\d+)", text)[1])

        # Spilled scalar registers go to lanes of vector registers, which costs no memory.
        spilled = number("vgpr_spill_count") + number("private_segment_fixed_size")
        return dict(registers=number("vgpr_count"), spilled=spilled, shared_memory=shared)
    (cubin,) = (p for n, p in compiled.metadata_group.items() if n.endswith(".cubin"))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    run = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True)
    used = re.search(r"REG:(\d+) STACK:(\d+)", run.stdout)
    return dict(registers=int(used[1]), spilled=int(used[2]), shared_memory=shared)


def described(error: BaseException) -> str:
    """With its deepest cause: errors in a function that a kernel calls name the call alone."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[-2000:]


def compile_all(target: str, launches: ModuleType, every: bool) -> list[Kernel]:
    """Of every op all kernels, each once per set of constants."""
    found: dict[str, Kernel] = {}
    run = JITFunction.run

    def compile_only(
        self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any
    ) -> None:
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        if compiled.hash not in found:
            names = {k: v for k, v in options.items() if k != "enable_fp_fusion"}
            constants = " ".join(f"{k}={v}" for k, v in names.items())
            found[compiled.hash] = Kernel(op, self.__name__, constants, **resources(compiled))

    triton.runtime.driver.set_active(NamesTheTarget(TARGETS[target].target))
    _triton.stand_in = TARGETS[target].chip
    JITFunction.run = compile_only
    try:
        for op, launch in launches.LAUNCHES.items():
            for call in launch(every):
                try:
                    call()
                except Exception as error:
                    found[f"{op} {len(found)}"] = Kernel(op, "", "", error=described(error))
    finally:
        JITFunction.run = run
    return list(found.values())


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--launches", type=Path, default=Path(__file__).with_name("launches.py"))
    asked = parser.parse_args()
    json.dump(compile_all(asked.target, module_of(asked.launches), asked.all), sys.stdout)


if __name__ == "__main__":
    main()
