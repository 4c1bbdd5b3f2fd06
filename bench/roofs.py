"""The limits that this machine shows in this run: how fast it reads and multiplies.

No call can be quicker than its bytes over the bandwidth of memory, nor than its operations over
the peak of the arithmetic: `Roofs.ms` is the larger of the two.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from bench.machine import last_level_cache
from specdec_kernels import native

ARITHMETIC = ("fp32 fma", "bf16 dot", "bf16 tiles")  # enum class Arithmetic
BUFFER_CACHES = 8
MAX_BUFFER = 1 << 30
PIECE = 16 << 20  # bytes read at a time: short enough to fall between two interruptions
SHORTEST_BURST = 1e-3  # seconds of arithmetic, likewise


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

    def operations_ms(self, operations: int) -> float:
        """Lane by lane, as many at a time as multiply-adds in fp32, which count as two."""
        return operations / (self.gflops["fp32"] / 2) / 1e6

    def line(self) -> str:
        return (
            f"roofs of {self.threads} threads: read {self.gb_per_s:.1f} GB/s, "
            f"fp32 {self.gflops['fp32']:.0f} GFLOP/s, "
            f"bf16 {self.gflops['bf16']:.0f} GFLOP/s ({self.arithmetic})"
        )


def measure_roofs(threads: int, seconds: float = 1.0) -> Roofs:
    """The best of many tries in about `seconds` for memory and as much for arithmetic."""
    rates = [_compute(kind, threads, seconds / len(ARITHMETIC)) for kind in range(len(ARITHMETIC))]
    best = max(range(len(rates)), key=rates.__getitem__)
    return Roofs(
        threads,
        _bandwidth(threads, seconds),
        {"fp32": rates[0], "bf16": rates[best]},
        ARITHMETIC[best],
    )


def _bandwidth(threads: int, seconds: float) -> float:
    """Of pieces that were last read a whole buffer ago, so that none is in a cache."""
    size = min(max(BUFFER_CACHES * last_level_cache(), 8 * PIECE), MAX_BUFFER)
    buffer = torch.ones(size // 4, dtype=torch.int32)
    pieces = [p for p in buffer.split(PIECE // 4) if p.numel() == PIECE // 4]
    turns = itertools.cycle(pieces)
    return (
        PIECE
        / _quickest(lambda: native.cpu.read_bandwidth_probe(next(turns), threads), seconds)
        / 1e9
    )


def _compute(kind: int, threads: int, seconds: float) -> float:
    """GFLOP/s; 0 where the CPU lacks the instruction."""

    probe = native.cpu.compute_probe
    rounds = 1000
    if probe(kind, rounds, 1) == 0:
        return 0.0
    while _quickest(partial(probe, kind, rounds, 1), 0.0) < SHORTEST_BURST:
        rounds *= 2
    best = _quickest(partial(probe, kind, rounds, threads), seconds)
    return probe(kind, rounds, threads) / best / 1e9


def _quickest(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the third quickest of all calls within `seconds`, five calls at least: the best of
    many, but not of luck."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[2]
