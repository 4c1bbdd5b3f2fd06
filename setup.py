"""Thin shim: CMake builds the compiled modules, this places them into the package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    def run(self):
        if os.environ.get("SPECDEC_NATIVE", "").upper() == "OFF" or not self._has_compiler():
            print("specdec_kernels: no C++ compiler (or SPECDEC_NATIVE=OFF); installing without compiled kernels")
            self.extensions = []
            return
        super().run()

    @staticmethod
    def _has_compiler():
        candidates = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
        return any(shutil.which(c.split()[0]) for c in candidates if c.strip())

    def build_extension(self, ext):
        import pybind11

        target = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(min(os.cpu_count() or 1, 8))
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]  # fmt: skip
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build), "--parallel", jobs], check=True)


setup(ext_modules=[Extension("specdec_kernels._cpu", [])], cmdclass={"build_ext": CMakeBuild})
