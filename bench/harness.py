"""Times an op beside its rivals, after checking all of them against the reference.

A file `bench/bench_NAME.py` offers one function::

    def cases(quick: bool) -> Iterable[Case]: ...

Each `Case` is one row of the table per backend. `make(seed)` builds one set of inputs, the same one
for the same seed; `run`, `reference` and every rival take that set and return what is compared. An
op that works in place returns the tensors it changed. `bytes` counts what one call has to read and
write at least. Nothing is timed before `run` (on every backend) and the rivals agree with
`reference`. All of them are then timed in turns, one call each per round, over sets of inputs that
together are larger than the last-level cache, and compared within the round: a machine that slows
down slows all of them.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import native
from specdec_kernels.dispatch import use_backend, why_unavailable

MAX_SETS = 64
MAX_SET_BYTES = 1 << 30
SHORTEST_IN_MS = 0.1  # what takes less is printed in microseconds
SHORTEST_SAMPLE = 100e-6  # seconds; shorter calls are repeated, the clock costs too much otherwise


def assert_same(got: Any, expected: Any) -> None:
    """Integers exactly, floats within the default tolerance of their dtype."""
    torch.testing.assert_close(got, expected, equal_nan=True, check_dtype=False)


@dataclass(frozen=True)
class Case:
    """One shape of one op; see the head of this file."""

    name: str
    make: Callable[[int], Any]
    run: Callable[[Any], Any]
    reference: Callable[[Any], Any]
    bytes: int
    rivals: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    backends: tuple[str, ...] = ("cpu",)
    check: Callable[[Any, Any], None] = assert_same


@dataclass(frozen=True)
class Sample:
    """Milliseconds of one call: median, 10th and 90th percentile."""

    ms: float
    p10: float
    p90: float

    @staticmethod
    def of(seconds: list[float]) -> Sample:
        ordered = sorted(1e3 * s for s in seconds)
        last = len(ordered) - 1
        return Sample(
            statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)]
        )


def measure(op: str, case: Case, *, seconds: float) -> Iterator[dict[str, Any]]:
    """Checks `case`, then times it for about `seconds` per contender; one record per backend."""
    backends = [b for b in case.backends if why_unavailable(b, "cpu") is None]
    contenders = {b: _on_backend(b, case.run) for b in backends} | case.rivals
    with torch.inference_mode():
        expected = case.reference(case.make(0))
        for name, function in contenders.items():
            try:
                case.check(function(case.make(0)), expected)
            except AssertionError as error:
                raise AssertionError(f"{op}, {case.name}: {name} is wrong: {error}") from None
        sets = _input_sets(case)
        times = _time_in_turns(contenders, sets, seconds)
    cold = len(sets) * case.bytes > last_level_cache()
    for backend in backends:
        ours = Sample.of(times[backend])
        yield {
            "op": op,
            "case": case.name,
            "backend": backend,
            "threads": torch.get_num_threads(),
            **ours.__dict__,
            "bytes": case.bytes,
            "gb_per_s": case.bytes / ours.ms / 1e6,
            "cold": cold,
            "rivals": {
                name: {
                    **Sample.of(times[name]).__dict__,
                    "ratio": _ratio(times[name], times[backend]),
                }
                for name in case.rivals
            },
        }


def _on_backend(backend: str, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(inputs: Any) -> Any:
        with use_backend(backend):
            return run(inputs)

    return call


def _ratio(rival: list[float], ours: list[float]) -> float:
    """How many times longer the rival takes, compared round by round."""
    return statistics.median(r / o for r, o in zip(rival, ours, strict=True))


def _input_sets(case: Case) -> list[Any]:
    """Enough sets that one is cold when its turn comes again, within MAX_SET_BYTES of memory."""
    first = case.make(0)
    wanted = math.ceil(2 * last_level_cache() / max(case.bytes, 1))
    affordable = MAX_SET_BYTES // max(_tensor_bytes(first), 1)
    count = max(2, min(wanted, affordable, MAX_SETS))
    return [first, *(case.make(seed) for seed in range(1, count))]


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return 0
    return sum(_tensor_bytes(item) for item in value)


def _time_in_turns(
    contenders: dict[str, Callable[[Any], Any]], sets: list[Any], seconds: float
) -> dict[str, list[float]]:
    """One list of seconds per call for each contender, index by index from the same round."""
    position = 0

    def sample(function: Callable[[Any], Any], calls: int) -> float:
        nonlocal position
        start = time.perf_counter()
        for _ in range(calls):
            function(sets[position % len(sets)])
            position += 1
        return (time.perf_counter() - start) / calls

    calls, longest = {}, 0.0
    for name, function in contenders.items():
        once = min(sample(function, 1) for _ in range(3))
        calls[name] = max(1, math.ceil(SHORTEST_SAMPLE / once))
        longest = max(longest, once * calls[name])
    rounds = max(5, min(300, int(seconds / longest)))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(rounds):
        for name in order:
            times[name].append(sample(contenders[name], calls[name]))
        order.append(order.pop(0))  # nobody always runs behind the same neighbour
    return times


def last_level_cache() -> int:
    """Bytes of the largest cache of CPU 0; 32 MiB when the system doesn't tell."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * unit)
    return max(sizes) or 32 << 20


def machine() -> dict[str, Any]:
    """What a number means nothing without."""
    names = [platform.processor() or platform.machine()]
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [x.split(":")[1].strip() for x in lines if x.startswith("model name")] or names
    return {
        "cpu": names[0],
        "cores": os.cpu_count(),
        "isa": native.cpu.isa() if native.cpu is not None else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def machine_line() -> str:
    m = machine()
    return (
        f"{m['cpu']}, {m['cores']} cores, {m['isa'] or 'no compiled kernels'}, "
        f"{m['threads']} threads; torch {m['torch']}, Python {m['python']}, {m['system']}"
    )


def table_row(record: dict[str, Any]) -> str:
    """One printed line: ours, the spread, the bandwidth, and each rival with its ratio to ours."""
    rivals = "  ".join(
        f"{name} {_duration(r['ms'])} ({r['ratio']:.2f}x)" for name, r in record["rivals"].items()
    )
    unit = 1e3 if record["ms"] < SHORTEST_IN_MS else 1
    return (
        f"  {record['case']:<40} {record['backend']:<9} {_duration(record['ms']):>12} "
        f"[{unit * record['p10']:.3f}, {unit * record['p90']:.3f}] "
        f"{record['gb_per_s']:7.2f} GB/s  {rivals}"
    )


def _duration(ms: float) -> str:
    return f"{1e3 * ms:.3f} us" if ms < SHORTEST_IN_MS else f"{ms:.3f} ms"
