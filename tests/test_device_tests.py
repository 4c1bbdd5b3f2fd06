"""The kernels' own tests, carried to a device: here to the CPU, with kernels that are made up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))  # the folder bench/ is not installed

from on_device import Carrier

from bench import device_tests
from bench.device_tests import Outcome

FAKE = """
import torch
from specdec_kernels import dispatch, native, ops

native.cuda_error, native.cuda_is_emulated = None, True
table = dispatch.IMPLEMENTATIONS["commit_kv_"]
right = table["reference"]

def broken(k, v, path, *rest):
    right(k, v, path, *rest)
    if path.shape[1] > 2:
        v[-1][..., 0] += 1

table["cuda"] = {function}
"""


@pytest.mark.parametrize("function", ["right", "broken"])
def test_tests_run_on_the_path_and_come_back_as_a_finding(monkeypatch, tmp_path, function):
    (tmp_path / "made_up_kernels.py").write_text(FAKE.format(function=function))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTEST_PLUGINS", "made_up_kernels")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (finding,) = device_tests.run_all([("commit_kv_", "cuda")], "cpu", True)
    assert finding[:3] == ("commit_kv_", "cuda", "tests")
    if function == "right":
        assert finding.error is None and finding.detail.endswith(" passed, 0 failed")
    else:
        assert "failed; first tests/test_commit_kv.py::" in finding.error


def test_a_process_that_dies_or_hangs_is_a_finding(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTEST_PLUGINS", "made_up_kernels")
    (file,) = device_tests.test_files("commit_kv_")
    (tmp_path / "made_up_kernels.py").write_text("import os; os.abort()")
    dead = device_tests.run_file(file, "cuda", "cpu", True, 60)
    assert dead.failed[0].startswith("test_commit_kv.py: the process ended without a report")
    (tmp_path / "made_up_kernels.py").write_text("import time; time.sleep(60)")
    slow = device_tests.run_file(file, "cuda", "cpu", True, 1)
    assert slow.failed == ("test_commit_kv.py: not done after 1 s",)
    finding = device_tests.judged("commit_kv_", "cuda", [Outcome(3, ()), slow])
    assert finding.error == f"3 passed, 1 failed; first {slow.failed[0]}"
    assert not device_tests.judged("commit_kv_", "cuda", [Outcome(0, ())]).passed


def test_carried_tensors_keep_strides_overlaps_and_what_lies_between():
    seen = []

    def run(k, v, path, *rest):
        seen.append((k, v))
        k[0].fill_(7)

    base = torch.full((4, 10), float("nan"))
    view, overlapping = base[1:3, 2:6], base[2:, 4:]
    Carrier("commit_kv_", run, torch.device("cpu"))([view], [overlapping], None)
    ((k,), (v,)) = seen[0]
    assert k.stride() == (10, 1) and k.storage_offset() == 12
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert k.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    assert base[1:3, 2:6].eq(7).all() and base.isnan().sum() == 32
