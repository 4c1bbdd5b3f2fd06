"""Times on a device: recordings of the call over sets of inputs that together exceed its cache."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from bench.device_checks import error_text, on_path
from bench.harness import Case, Function, Sample, copy_of, tensor_bytes

MAX_SETS = 128
MAX_BYTES = 8 << 30
CACHES = 2  # how often the sets fill the cache
ROUNDS = {True: 20, False: 60}  # by --quick


class Contenders(NamedTuple):
    """run: by name, what runs a contender on every set. eager: those that were not recorded.
    errors: by name, why a contender has no time."""

    run: dict[str, Callable[[], object]]
    eager: list[str]
    errors: dict[str, str]


def measure(
    device: Any, op: str, case: Case, paths: list[str], gb_per_s: float, quick: bool
) -> list[dict[str, Any]]:
    """One record per path. A rival that fails has the text of its error in place of a time; `eager`
    names those that were not replayed."""
    first = device.move(case.make(0))
    sets = [first, *(copy_of(first) for _ in range(1, _count(device, case, first)))]
    contenders = _prepare(device, case, paths, sets)
    times = _in_turns(device, contenders.run, len(sets), ROUNDS[quick])
    rivals = {
        name: Sample.of(times[name]).ms if name in times else contenders.errors[name]
        for name in case.rivals
    }
    records = []
    for path in paths:
        record: dict[str, Any] = {"op": op, "path": path, "case": dict(case.shape)}
        if path in contenders.errors:
            record["error"] = contenders.errors[path]
        else:
            sample = Sample.of(times[path])
            reached = case.bytes / sample.ms / 1e6
            record |= sample.__dict__
            record |= {"bytes": case.bytes, "gb_per_s": reached, "of_copy": reached / gb_per_s}
            record |= {"tflops": case.flops / sample.ms / 1e9}
            record |= {"rivals": rivals, "eager": contenders.eager}
        records.append(record)
    return records


def _prepare(device: Any, case: Case, paths: list[str], sets: list[Any]) -> Contenders:
    calls: dict[str, Function] = {path: on_path(path, case.run) for path in paths}
    contenders = Contenders({}, [], {})
    for name, call in (calls | case.rivals).items():
        try:
            if name in case.rivals and case.check_rival is None:
                case.check(call(device.move(sets[0])), case.reference(device.move(sets[0])))
            contenders.run[name], is_eager = _over(device, call, sets)
            if is_eager:
                contenders.eager.append(name)
        except Exception as error:  # a rival of another version, most likely
            contenders.errors[name] = error_text(error)
    return contenders


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
