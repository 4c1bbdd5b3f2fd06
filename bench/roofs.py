"""The limits that this machine shows in this run: how fast it reads and multiplies.

No call can be quicker than its bytes over the bandwidth of memory, nor than its operations over
the peak of the arithmetic: `Roofs.ms` is the larger of the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.machine import last_level_cache
from specdec_kernels import native

ARITHMETIC = ("fp32 fma", "bf16 dot", "bf16 tiles")  # enum class Arithmetic
BUFFER_CACHES = 4
MAX_BUFFER = 1 << 30


@dataclass(frozen=True)
class Roofs:
    """Of one thread count. gflops has the best that was found per dtype, fp32 and bf16."""

    threads: int
    gb_per_s: float
    gflops: dict[str, float]
    arithmetic: str  # what reached the bf16 peak

    def ms(self, nbytes: int, flops: int, dtype: str) -> float:
        peak = self.gflops["bf16" if dtype == "bf16" else "fp32"]
        return max(nbytes / self.gb_per_s, flops / peak) / 1e6

    def line(self) -> str:
        return (
            f"roofs of {self.threads} threads: read {self.gb_per_s:.1f} GB/s, "
            f"fp32 {self.gflops['fp32']:.0f} GFLOP/s, "
            f"bf16 {self.gflops['bf16']:.0f} GFLOP/s ({self.arithmetic})"
        )


def measure_roofs(threads: int, seconds: float = 1.0) -> Roofs:
    """The best of many tries, about `seconds` for memory and as much for arithmetic."""
    rates = [_compute(kind, threads, seconds / len(ARITHMETIC)) for kind in range(len(ARITHMETIC))]
    best = max(range(len(rates)), key=rates.__getitem__)
    return Roofs(
        threads,
        _bandwidth(threads, seconds),
        {"fp32": rates[0], "bf16": rates[best]},
        ARITHMETIC[best],
    )


def _bandwidth(threads: int, seconds: float) -> float:
    size = min(max(BUFFER_CACHES * last_level_cache(), 64 << 20), MAX_BUFFER)
    buffer = torch.ones(size // 4, dtype=torch.int32)
    expected = buffer.numel() % (1 << 32)
    got = native.cpu.read_bandwidth_probe(buffer, 1)
    if got != expected:
        raise AssertionError(f"read_bandwidth_probe read {got} words of {expected}")
    return size / _quickest(lambda: native.cpu.read_bandwidth_probe(buffer, threads), seconds) / 1e9


def _compute(kind: int, threads: int, seconds: float) -> float:
    """GFLOP/s; 0 where the CPU lacks the instruction."""
    rounds, flops = 1000, 0.0
    while True:
        start = time.perf_counter()
        flops = native.cpu.compute_probe(kind, rounds, threads)
        if flops == 0:
            return 0.0
        if time.perf_counter() - start > 2e-3:
            break
        rounds *= 4
    return flops / _quickest(lambda: native.cpu.compute_probe(kind, rounds, threads), seconds) / 1e9


def _quickest(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the quickest call within `seconds`, three calls at least."""
    best, tries = float("inf"), 0
    end = time.perf_counter() + seconds
    while tries < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best, tries = min(best, time.perf_counter() - start), tries + 1
    return best
