"""The kernels' tests on a GPU: `pytest -p on_device --device cuda --path triton tests/test_X.py`.

The tests make CPU tensors. Here an op on the path's backend carries its arguments to the device and
its results back, storages as they are: strides, offsets, overlaps and what lies between the rows
stay. Only the tests that take that backend run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import (
    dispatch,
    ops,  # noqa: F401  registers them
    proven,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("on_device")
    group.addoption("--device", default="cuda", help="where the kernels run")
    group.addoption("--path", choices=proven.PATHS, help="which kernels")
    group.addoption("--report", metavar="FILE", help="what passed and failed, as JSON")


def backend_of(path: str) -> str:
    return path.split("-")[0]


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("path")
    config.pluginmanager.register(Report(config.getoption("report")), "on_device_report")
    trial = proven.trying("cuda-hopper", path == "cuda-hopper")
    trial.__enter__()
    config.add_cleanup(lambda: trial.__exit__(None, None, None))
    install(backend_of(path), torch.device(config.getoption("device")))


def install(backend: str, device: torch.device) -> None:
    """Makes `backend` take CPU tensors."""
    for op, table in dispatch.IMPLEMENTATIONS.items():
        if backend in table:
            table[backend] = Carrier(op, table[backend], device)
    reason = dispatch.why_unavailable

    def why_unavailable(name: str, device_type: str) -> str | None:
        return reason(name, device.type if name == backend else device_type)

    dispatch.why_unavailable = why_unavailable


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = backend_of(config.getoption("path"))
    mine = [item for item in items if wanted in parameters(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in mine])
    items[:] = mine


def parameters(item: pytest.Item) -> list[Any]:
    call = getattr(item, "callspec", None)
    return [] if call is None else [v for v in call.params.values() if isinstance(v, str)]


class Carrier:
    """An implementation that runs elsewhere than its tensors are."""

    def __init__(self, op: str, run: Any, device: torch.device):
        schema = getattr(torch.ops.specdec_kernels, op).default._schema
        self.writes = any(a.alias_info is not None for a in schema.arguments)
        self.run, self.device = run, device

    def __call__(self, *args: Any) -> Any:
        storages: dict[int, tuple[Tensor, Tensor]] = {}
        moved = [self._to_device(arg, storages) for arg in args]
        results = self.run(*moved)
        if self.writes:
            for here, there in storages.values():
                here.copy_(there)
        return back(results)

    def _to_device(self, value: Any, storages: dict[int, tuple[Tensor, Tensor]]) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._to_device(item, storages) for item in value)
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in storages:
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            storages[storage.data_ptr()] = here, here.to(self.device, copy=True)
        there = storages[storage.data_ptr()][1].untyped_storage()
        empty = torch.empty(0, dtype=value.dtype, device=self.device)
        return empty.set_(there, value.storage_offset(), value.size(), value.stride())


def back(results: Any) -> Any:
    if isinstance(results, Tensor):
        return results.cpu()
    return tuple(map(back, results)) if isinstance(results, (list, tuple)) else results


class Report:
    def __init__(self, file: str | None):
        self.file = file
        self.passed = self.skipped = 0
        self.failed: list[dict[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            text = getattr(report.longrepr, "reprcrash", None)
            error = getattr(text, "message", None) or str(report.longrepr)
            self.failed.append({"test": report.nodeid, "error": error})
        elif report.when == "call":
            self.passed += report.passed
            self.skipped += report.skipped

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append({"test": report.nodeid, "error": str(report.longrepr)[-2000:]})

    def pytest_sessionfinish(self) -> None:
        if self.file is not None:
            counts = {"passed": self.passed, "skipped": self.skipped, "failed": self.failed}
            Path(self.file).write_text(json.dumps(counts), encoding="utf-8")
