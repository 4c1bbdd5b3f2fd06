"""The limits of the machine as benchmarks measure them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))  # the folder bench/ is not installed

from bench.roofs import Roofs, measure_roofs
from specdec_kernels import native

pytestmark = pytest.mark.skipif(native.cpu is None, reason="no CPU kernels")

ROOFS = Roofs(1, 10.0, {"fp32": 100.0, "bf16": 200.0}, "bf16 dot")


def test_the_roof_is_the_nearer_limit():
    assert ROOFS.ms(10**7, 0, "fp32") == pytest.approx(1.0)
    assert ROOFS.ms(10**7, 4 * 10**8, "fp32") == pytest.approx(4.0)
    assert ROOFS.ms(10**7, 4 * 10**8, "bf16") == pytest.approx(2.0)


def test_roofs_are_measured():
    roofs = measure_roofs(1, seconds=0.02)
    assert roofs.gb_per_s > 0 and 0 < roofs.gflops["fp32"] <= roofs.gflops["bf16"]
    assert "GB/s" in roofs.line()


def test_probes_do_the_work_they_are_asked_for():
    for threads in (1, 2, 3):
        words = torch.ones(threads * 4096, dtype=torch.int32)
        assert native.cpu.read_bandwidth_probe(words, threads) == words.numel()
        assert native.cpu.compute_probe(0, 10, threads) > 0
    assert native.cpu.compute_probe(99, 10, 1) == 0
    with pytest.raises(ValueError, match="num_threads"):
        native.cpu.read_bandwidth_probe(words, 0)
    with pytest.raises(ValueError, match="num_threads"):
        native.cpu.compute_probe(0, 10, 0)
