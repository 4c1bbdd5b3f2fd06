"""Thin shim: CMake builds the compiled modules, this places them into the package."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    def build_extensions(self):
        import pybind11  # a build requirement: absent when the metadata alone is wanted

        target = Path(self.get_ext_fullpath("specdec_kernels._cpu")).parent.resolve()
        tag = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        build = ROOT / "build" / f"cmake-{tag}"
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(min(os.cpu_count() or 1, 8))
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]  # fmt: skip
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build), "--parallel", jobs], check=True)


def wants_native():
    choice = os.environ.get("SPECDEC_NATIVE", "AUTO").upper()
    if choice not in ("AUTO", "ON", "OFF"):
        raise SystemExit(f"SPECDEC_NATIVE: expected AUTO, ON or OFF, got {choice}")
    if choice != "AUTO":
        return choice == "ON"
    return bool(os.environ.get("CXX") or any(map(shutil.which, ("c++", "g++", "clang++"))))


if wants_native():
    # CMake decides whether the CUDA module is built, so its file may be missing.
    modules = [
        Extension("specdec_kernels._cpu", []),
        Extension("specdec_kernels._cuda", [], optional=True),
    ]
else:
    print("specdec_kernels: no C++ compiler (or SPECDEC_NATIVE=OFF): no compiled kernels")
    modules = []

setup(ext_modules=modules, cmdclass={"build_ext": CMakeBuild})
