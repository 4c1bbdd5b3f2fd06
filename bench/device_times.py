"""Times on a device: recordings of the call over sets of inputs that together exceed its cache."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from bench.device_checks import on_path
from bench.harness import Case, Function, Sample, copy_of, tensor_bytes

MAX_SETS = 128
MAX_BYTES = 8 << 30
CACHES = 2  # how often the sets fill the cache
ROUNDS = {True: 20, False: 60}  # by --quick


def measure(
    device: Any, op: str, case: Case, paths: list[str], gb_per_s: float, quick: bool
) -> Iterator[dict[str, Any]]:
    """One record per path. A rival that fails has the text of its error in place of a time; `eager`
    names those that were not replayed."""
    first = device.move(case.make(0))
    sets = [first, *(copy_of(first) for _ in range(1, _count(device, case, first)))]
    calls: dict[str, Function] = {path: on_path(path, case.run) for path in paths}
    calls |= case.rivals
    recorded: dict[str, Callable[[], object]] = {}
    errors: dict[str, str] = {}
    eager: list[str] = []
    for name, call in calls.items():
        try:
            if name in case.rivals and case.check_rival is None:
                case.check(call(device.move(first)), case.reference(device.move(first)))
            recorded[name], is_eager = _over(device, call, sets)
            if is_eager:
                eager.append(name)
        except Exception as error:  # a rival of another version, most likely
            errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    times = _in_turns(device, recorded, len(sets), ROUNDS[quick])
    rivals: dict[str, float | str] = {
        name: 1e3 * sorted(times[name])[len(times[name]) // 2] if name in times else errors[name]
        for name in case.rivals
    }
    for path in paths:
        if path in errors:
            yield {"op": op, "path": path, "case": dict(case.shape), "error": errors[path]}
            continue
        sample = Sample.of(times[path])
        reached = case.bytes / sample.ms / 1e6
        yield {
            "op": op,
            "path": path,
            "case": dict(case.shape),
            **sample.__dict__,
            "bytes": case.bytes,
            "gb_per_s": reached,
            "of_copy": reached / gb_per_s,
            "tflops": case.flops / sample.ms / 1e9,
            "rivals": rivals,
            "eager": eager,
        }


def _count(device: Any, case: Case, first: Any) -> int:
    wanted = math.ceil(CACHES * device.cache_bytes() / max(case.bytes, 1))
    return max(1, min(wanted, MAX_SETS, MAX_BYTES // max(tensor_bytes(first), 1)))


def _over(device: Any, call: Function, sets: list[Any]) -> tuple[Callable[[], object], bool]:
    """Runs `call` on every set: replayed, or, with True, as it is where it cannot be recorded."""

    def run() -> None:
        for inputs in sets:
            call(inputs)

    run()  # compiles
    with contextlib.suppress(Exception):
        return device.capture(run).replay, False
    device.synchronize()
    return run, True


def _in_turns(
    device: Any, calls: dict[str, Callable[[], object]], sets: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds per set: whoever is slowed down by the machine, all are."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        for name in order:
            times[name].append(device.seconds(calls[name]) / sets)
        order.append(order.pop(0))
    return times
