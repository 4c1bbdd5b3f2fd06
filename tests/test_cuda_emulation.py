"""The emulation of CUDA itself: right kernels give right results, every planted fault is caught."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "cuda_emulation"
COMPILER = os.environ.get("CXX") or shutil.which("g++")
SCHEDULES = range(4)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(scope="module")
def controls(tmp_path_factory):
    """Runs one control under one schedule and returns what it printed."""
    program = tmp_path_factory.mktemp("controls") / "controls"
    sources = [FOLDER / "controls.cu", *sorted((FOLDER / "emulation").glob("*.cpp"))]
    flags = ["-std=gnu++17", "-O1", "-g1", "-fsanitize=address,undefined", "-Wno-unknown-pragmas"]
    flags += ["-fno-sanitize-recover=undefined", "-ffp-contract=off"]
    includes = [f"-I{FOLDER}", f"-I{FOLDER.parents[1] / 'csrc'}"]
    command = [COMPILER, *flags, *includes, "-x", "c++", *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True)
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    environment["ASAN_OPTIONS"] = "detect_leaks=0"  # a fault leaves kernels and launchers midway

    def run(name: str, schedule: int) -> str:
        result = subprocess.run(
            [str(program), name, str(schedule)], capture_output=True, text=True, env=environment
        )
        return result.stdout + result.stderr

    return run


@pytest.mark.parametrize("name", ["sum", "reverse", "product_bf16", "product_f16", "conversions"])
def test_right_kernels_are_right_under_every_schedule(controls, name):
    for schedule in SCHEDULES:
        assert controls(name, schedule) == "right\n"


@pytest.mark.parametrize(
    ("name", "report"),
    [
        ("global_out_of_bounds", "heap-buffer-overflow"),
        ("shared_out_of_bounds", "index 4 out of bounds"),
        ("dynamic_shared_out_of_bounds", "heap-buffer-overflow"),
        ("divergent_barrier", "threads of a block meet in different barriers"),
        ("divergent_shuffle", "deadlock: "),
        ("shuffle_from_outside", "shuffle from a lane outside the mask"),
        ("misaligned_load", "cp.async from a misaligned address"),
        ("unwritten_shared", "wrong"),
        ("missing_wait", "wrong"),
    ],
)
def test_faults_are_caught_under_every_schedule(controls, name, report):
    for schedule in SCHEDULES:
        assert report in controls(name, schedule)


def test_a_missing_barrier_shows_under_some_schedules(controls):
    found = ["wrong" in controls("missing_barrier", schedule) for schedule in SCHEDULES]
    assert any(found)
    assert not all(found)  # which is why one schedule is not enough
