"""What nvcc makes of every kernel for every architecture we ship: no spills, and not too much."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LARGEST_MODULE = 20 << 20  # of a wheel, most of which are these kernels
TARGETS = re.search(
    r"set\(ALL_ARCHITECTURES ([^)]*)\)", (ROOT / "CMakeLists.txt").read_text()
).group(1)  # type: ignore[union-attr]
KERNELS = sorted(p.name for p in ROOT.glob("csrc/*/*.cu") if "tree_attention_cuda" not in p.name)


def nvcc() -> str | None:
    found = shutil.which("nvcc")
    if found is None:
        return None
    version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", version)
    return found if release and (int(release[1]), int(release[2])) >= (12, 8) else None


NVCC = nvcc()
pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc 12.8 or newer")


def architectures() -> list[str]:
    """As nvcc's options; a bare number in CMake's list asks for PTX too."""
    options = []
    for target in TARGETS.split():
        name, real = target.removesuffix("-real"), target.endswith("-real")
        code = f"sm_{name}" if real else f"[sm_{name},compute_{name}]"
        options.append(f"-gencode=arch=compute_{name},code={code}")
    return options


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    return {}


@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_without_spills(kernel, sizes, tmp_path):
    source = next(ROOT.glob(f"csrc/*/{kernel}"))
    target = tmp_path / "kernel.o"
    flags = [
        "-std=c++17",
        "-O3",
        "--fmad=false",
        "--compress-mode=size",
        "-Xptxas",
        "-v",
        "-Xcompiler",
        "-fPIC",
    ]
    command = [str(NVCC), *flags, *architectures(), f"-I{ROOT / 'csrc'}", "-c", str(source)]
    result = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    report = result.stdout + result.stderr
    assert "warning" not in report
    assert "wgmma.mma_async instructions are serialized" not in report
    entries = re.findall(
        r"entry function '(\w+)' for '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads",
        report,
        re.DOTALL,
    )
    compiled_for = {architecture for _, architecture, *_ in entries}
    assert len(compiled_for) >= len(TARGETS.split()), report
    spills = [entry for entry in entries if entry[3:] != ("0", "0")]
    assert not spills
    # A stack frame is an array with a running index, which lives in memory: fragments never should.
    frames = [entry for entry in entries if "attention" in entry[0] and entry[2] != "0"]
    assert not frames
    sizes[kernel] = target.stat().st_size


def test_module_stays_small(sizes):
    assert sum(sizes.values()) < LARGEST_MODULE
