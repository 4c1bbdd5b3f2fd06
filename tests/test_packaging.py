"""What is installed, what it needs, and that the package imports wherever torch does."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import specdec_kernels
from specdec_kernels import native
from specdec_kernels.ops import commit_kv_

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGE = Path(specdec_kernels.__file__).parent
MAX_WHEEL_BYTES = 20 << 20


def python(code: str, **environment: str) -> str:
    """Standard output of a fresh interpreter that finds this package."""
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), **environment}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


# ---- metadata


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_building_needs_neither_torch_nor_cuda():
    requires = " ".join(project()["build-system"]["requires"])
    assert not re.search(r"torch|cuda|nvidia|triton", requires)


def test_torch_is_the_only_dependency_and_triton_an_extra_for_linux():
    metadata = project()["project"]
    assert [re.split(r"[<>=]", d)[0] for d in metadata["dependencies"]] == ["torch"]
    for requirements in metadata["optional-dependencies"].values():
        for requirement in requirements:
            assert not requirement.startswith("triton") or "platform_system" in requirement


def test_version_has_one_source():
    assert project()["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "specdec_kernels.__version__"
    }
    try:
        installed = importlib.metadata.version("specdec-kernels")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("imported from a checkout that was not installed")
    assert installed == specdec_kernels.__version__


# ---- import


USE = """
import torch
from specdec_kernels.ops import commit_kv_
cache = [torch.arange(8.0).view(1, 1, 8, 1)]
path = torch.tensor([[0, 2]], dtype=torch.int32)
commit_kv_(cache, [c.clone() for c in cache], path, path[:, 1], path[:, 1])
assert cache[0].flatten().tolist() == [0, 1, 2, 4, 4, 5, 6, 7]
"""


def test_import_pulls_in_neither_transformers_nor_triton():
    code = """
import sys, torch
before = set(sys.modules)
import specdec_kernels, specdec_kernels.ops
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
    new = python(code).split()
    assert "specdec_kernels" in new
    assert not {"transformers", "triton", "numpy", "scipy"} & set(new)


@pytest.mark.parametrize("missing", ["triton", "transformers", "specdec_kernels._cpu"])
def test_works_without(missing):
    python(f"import sys; sys.modules[{missing!r}] = None\n" + USE)


def test_works_without_visible_devices():
    python(USE, CUDA_VISIBLE_DEVICES="")


def test_a_missing_module_is_named_when_asked_for():
    code = """
import sys; sys.modules["specdec_kernels._cpu"] = None
from specdec_kernels.dispatch import why_unavailable
print(why_unavailable("cpu", "cpu"))
"""
    assert "no C++ compiler was found" in python(code)


def test_cuda_without_a_device_is_refused():
    cache, path = torch.zeros(1, 1, 8, 2), torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"commit_kv_: backend 'cuda'.*takes CUDA tensors"):
        commit_kv_([cache], [cache.clone()], path, path[:, 0], path[:, 0], backend="cuda")


@pytest.mark.skipif(native.cuda is None, reason=str(native.cuda_error))
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a device: the call would succeed")
def test_a_cuda_error_names_the_op():
    table = torch.zeros(9, dtype=torch.int64)
    row = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"commit_kv_: CUDA error \d+: \w+"):
        native.cuda.commit_kv(table, 4, row, row[0], row[0], None, 0, 0)


# ---- compiled modules


def isa_objects() -> list[Path]:
    """Objects of the newest build folder, those that its build.ninja still names."""
    ninjas = sorted(ROOT.glob("build/*/build.ninja"), key=lambda p: p.stat().st_mtime)
    if not ninjas:
        return []
    names = re.findall(r"^build (CMakeFiles/cpu_\w+\.dir/\S+\.o):", ninjas[-1].read_text(), re.M)
    return [p for p in (ninjas[-1].parent / name for name in names) if p.exists()]


@pytest.mark.skipif(not shutil.which("nm"), reason="no nm")
def test_objects_of_one_instruction_set_share_no_symbols_with_another():
    """A weak symbol built for AVX-512 could be the one that the linker picks for every machine."""
    objects = isa_objects()
    if not objects:
        pytest.skip("no build folder")
    listing = subprocess.run(
        ["nm", "-C", "-A", *map(str, objects)], capture_output=True, text=True, check=True
    ).stdout
    weak = [line for line in listing.splitlines() if re.search(r" [WVu] ", line)]
    assert not weak, "\n".join(weak)


def test_compiled_modules_are_small_and_bundle_no_openmp_runtime():
    libraries = list(PACKAGE.rglob("*.so*"))
    assert sum(p.stat().st_size for p in libraries) < MAX_WHEEL_BYTES
    assert all(re.match(r"_(cpu|cuda)\.", p.name) for p in libraries)


# ---- distributions


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the sources, so that building leaves nothing behind."""
    if not (ROOT / "setup.py").exists():
        pytest.skip("needs the sources")
    pytest.importorskip("setuptools", minversion="77")
    target = tmp_path_factory.mktemp("checkout") / "source"
    unwanted = (".git", ".venv", "build", "dist", "*.egg-info", "*.so", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*unwanted))
    return target


def build(what: str, source: Path, **environment: str) -> subprocess.CompletedProcess:
    """Runs setuptools as pip does, in an environment that offers no compiler unless given."""
    (source / "empty").mkdir(exist_ok=True)
    env = {k: v for k, v in os.environ.items() if k not in ("CXX", "SPECDEC_NATIVE", "CMAKE_ARGS")}
    env |= {"PATH": str(source / "empty"), **environment}
    code = f"import setuptools.build_meta as b; b.build_{what}('dist')"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=source, env=env, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def unpacked_sdist(checkout, tmp_path_factory) -> Path:
    result = build("sdist", checkout)
    assert result.returncode == 0, result.stderr
    (archive,) = (checkout / "dist").glob("*.tar.gz")
    target = tmp_path_factory.mktemp("sdist")
    with tarfile.open(archive) as tar:
        assert not [name for name in tar.getnames() if name.endswith((".so", ".pyc"))]
        tar.extractall(target, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (folder,) = target.iterdir()
    return folder


def test_the_source_distribution_holds_everything_that_a_build_needs(unpacked_sdist):
    for pattern in (
        "csrc/**/*",
        "python/*",
        "specdec_kernels/**/*.py",
        "CMakeLists.txt",
        "setup.py",
    ):
        for file in ROOT.glob(pattern):
            if file.is_file():
                assert (unpacked_sdist / file.relative_to(ROOT)).exists(), file


def test_without_a_compiler_the_wheel_is_pure_python(unpacked_sdist):
    result = build("wheel", unpacked_sdist)
    assert result.returncode == 0, result.stderr
    assert "no compiled kernels" in result.stdout
    (wheel,) = (unpacked_sdist / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for file in PACKAGE.rglob("*.py"):
        assert file.relative_to(PACKAGE.parent).as_posix() in names
    assert not [name for name in names if name.split("/")[0] in ("tests", "bench")]


def test_a_broken_compiler_fails_the_installation(unpacked_sdist):
    pytest.importorskip("pybind11")
    if not (shutil.which("cmake") and shutil.which("ninja") and shutil.which("false")):
        pytest.skip("no cmake or no ninja")
    result = build("wheel", unpacked_sdist, PATH=os.environ["PATH"], CXX=shutil.which("false"))
    assert result.returncode != 0
    assert "CXX compiler" in result.stderr + result.stdout
