"""SPECDEC_CPU_ISA: a name that the machine lacks is refused, by the import and by the command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec_kernels import native

if native.cpu is None:
    pytest.skip(str(native.cpu_error), allow_module_level=True)

NAMES = ["baseline", "avx2", "avx512", "avx512_bf16", "amx"]
EXPECTED = "SPECDEC_CPU_ISA: expected baseline, avx2, avx512, avx512_bf16 or amx"


def run(isa, *command):
    env = os.environ | {
        "SPECDEC_CPU_ISA": isa, "PYTHONPATH": str(Path(native.__file__).parents[1])
    }  # fmt: skip
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def refused():
    """The nonsense, and the names of sets that this machine or build lacks."""
    code = "import specdec_kernels.native as n; print(n.cpu.isa())"
    best = run("", "-c", code).stdout.strip()
    return ["nonsense", *NAMES[NAMES.index(best) + 1 :]]


def test_import_raises(refused):
    code = "try:\n  import specdec_kernels\nexcept ImportError as error:\n  print(error)"
    for isa in refused:
        done = run(isa, "-c", code)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(EXPECTED)


def test_command_says_it_in_a_line(refused, tmp_path):
    script = tmp_path / "specdec"  # what pip installs
    script.write_text("import sys\nfrom specdec_kernels.cli import main\nsys.exit(main())\n")
    for isa in refused:
        for command in ([str(script), "doctor"], ["-m", "specdec_kernels", "--version"]):
            done = run(isa, *command)
            assert (done.returncode, done.stdout) == (2, "")
            assert done.stderr.startswith(f"specdec: {EXPECTED}")
            assert done.stderr.count("\n") == 1


def test_a_name_of_this_machine_is_used():
    done = run("baseline", "-c", "import specdec_kernels.native as n; print(n.cpu.isa())")
    assert done.stdout == "baseline\n"
    assert run("baseline", "-m", "specdec_kernels", "--version").returncode == 0
