"""Times an op beside its rivals, after checking all of them against the reference.

A file `bench/bench_NAME.py` offers one function::

    def cases(options: Options) -> Iterable[Case]: ...

Each `Case` is one row of the table per backend. `make(seed)` builds a set of inputs; `run`,
`reference` and every rival take such a set and return what is compared. An op that works in place
returns the tensors it changed and sets `in_place`. Nothing is timed before `run` (on every backend)
and the rivals agree with `reference`. All of them are then timed in turns, one sample each per
round, over sets of inputs that together are twice the last-level cache: a machine that slows down
slows all of them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.machine import last_level_cache, machine
from bench.roofs import Roofs
from specdec_kernels import native
from specdec_kernels.dispatch import asked_for, use_backend, why_unavailable

MAX_SETS = 1024
MAX_SET_BYTES = 1 << 30
SHORTEST_SAMPLE = 100e-6  # seconds; shorter calls are repeated, the clock costs too much otherwise
SHORTEST_AVERAGE = 10e-3  # the same where a call's work depends on the set
SLOW_CALL = 50e-3
RIVALS = (
    "sdpa_bool", "sdpa_folded", "flex", "hf_sdpa", "torch_batched", "hf_speculative_sampling",
    "prompt_lookup", "ngram_lookup", "torch_linear", "index_copy", "arctic_inference",
    "python_dict", "torch_argmax", "torch_softmax", "torch_unfold", "flashinfer", "sgl_kernel",
)  # fmt: skip
READ = "read"
OUTCOME = ("accepted", "rows", "rows_visited", "visited_bytes")

Function = Callable[[Any], Any]


class WrongResult(Exception):
    """A contender disagrees with the reference."""


@dataclass(frozen=True)
class Options:
    """What the command line asks of the benchmarks."""

    quick: bool = False
    flex: bool = False


def assert_same(got: Any, expected: Any) -> None:
    """Integers exactly, floats within the default tolerance of their dtype."""
    torch.testing.assert_close(got, expected, equal_nan=True, check_dtype=False)


@dataclass(frozen=True)
class Case:
    """One shape of one op; see the head of this file.

    shape: what tells this case from the others, with "dtype" always: the record's "case".
    bytes, flops: what one call has to read and write, and to compute, at least.
    check: raises AssertionError unless its first argument agrees with the second, the reference's.
    check_rival: the same for rivals, with the inputs as third argument; None takes `check`.
    vary: the work depends on the values, so each set has a seed of its own; else they are copies.
    facts: the keys of OUTCOME for the record's "case", from our results for all sets.
    reads: the contiguous tensors that one call has to read; they are then read by the bandwidth
        probe too, in turns with the others: what memory gives in such pieces, `read_ms`.
    operations: of one call, from the record's "case": lane by lane in fp32 or integers, as random
        numbers need them; each weighs as much as a multiply-add.
    """

    shape: dict[str, Any]
    make: Callable[[int], Any]
    run: Function
    reference: Function
    bytes: int
    flops: int = 0
    rivals: dict[str, Function] = field(default_factory=dict)
    backends: tuple[str, ...] = ("cpu",)
    check: Callable[[Any, Any], None] = assert_same
    check_rival: Callable[[Any, Any, Any], None] | None = None
    facts: Callable[[list[Any]], dict[str, Any]] | None = None
    reads: Callable[[Any], list[Tensor]] | None = None
    operations: Callable[[dict[str, Any]], int] | None = None
    vary: bool = False
    in_place: bool = False

    def __post_init__(self) -> None:
        unknown = set(self.rivals) - set(RIVALS)
        if unknown:
            raise ValueError(f"Case: expected rivals among {', '.join(RIVALS)}, got {unknown}")


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


@torch.inference_mode()
def measure(op: str, case: Case, roofs: Roofs, *, seconds: float) -> list[dict[str, Any]]:
    """Checks `case`, then times it for about `seconds`; one record per backend."""
    backends = [b for b in case.backends if why_unavailable(b, "cpu") is None]
    ours = {b: _on_backend(b, case.run) for b in backends}
    inputs = case.make(0)
    check(op, case, ours, inputs)
    sets = input_sets(case, inputs)
    shape = dict(case.shape)
    if case.facts is not None:
        shape |= case.facts([case.run(x) for x in sets])
    shortest = SHORTEST_AVERAGE if case.vary else SHORTEST_SAMPLE
    probe = {} if case.reads is None else {READ: _reader(case.reads, roofs.threads)}
    times = time_in_turns(ours | case.rivals | probe, sets, seconds, shortest)
    more = {f"{name}_ms": Sample.of(times[name]).ms for name in probe}
    if case.operations is not None:
        more["arithmetic_ms"] = roofs.operations_ms(case.operations(shape))
    return [
        {
            "op": op,
            "case": shape,
            "backend": backend,
            "threads": roofs.threads,
            **Sample.of(times[backend]).__dict__,
            "bytes": case.bytes,
            "roof_ms": roofs.ms(case.bytes, case.flops, shape["dtype"]),
            **more,
            "rivals": {name: Sample.of(times[name]).ms for name in case.rivals},
            "machine": machine() | {"gb_per_s": roofs.gb_per_s, "gflops": roofs.gflops},
        }
        for backend in backends
    ]


def check(op: str, case: Case, ours: dict[str, Function], inputs: Any) -> None:
    """Holds everyone against the reference."""

    def fresh() -> Any:
        return copy_of(inputs) if case.in_place else inputs

    expected = case.reference(fresh())
    for name, function in (ours | case.rivals).items():
        try:
            got = function(fresh())
            if name in ours or case.check_rival is None:
                case.check(got, expected)
            else:
                case.check_rival(got, expected, inputs)
        except AssertionError as error:
            reason = " ".join(str(error).split())[:300]
            raise WrongResult(f"{op}, {label(case.shape)}: {name} is wrong: {reason}") from None


def label(shape: dict[str, Any]) -> str:
    """What was measured, without what came out."""
    return " ".join(
        str(v) if k == "dtype" else f"{k}={v}" for k, v in shape.items() if k not in OUTCOME
    )


def _reader(reads: Callable[[Any], list[Tensor]], threads: int) -> Function:
    def call(inputs: Any) -> None:
        for tensor in reads(inputs):
            native.cpu.read_bandwidth_probe(tensor.view(-1), threads)

    return call


def _on_backend(backend: str, run: Function) -> Function:
    if backend == "cpu" and asked_for() in ("", "cpu"):
        return run  # it is what runs anyway, and most users don't pay for a context

    def call(inputs: Any) -> Any:
        with use_backend(backend):
            return run(inputs)

    return call


def number_of_sets(touched: int, held: int) -> int:
    """Copies of which one is cold when its turn comes again, within MAX_SET_BYTES of memory.

    touched: bytes that a call reads and writes. held: bytes of a copy.
    """
    wanted = math.ceil(2 * last_level_cache() / max(touched, 1))
    return max(1, min(wanted, MAX_SET_BYTES // max(held, 1), MAX_SETS))


def input_sets(case: Case, first: Any) -> list[Any]:
    count = number_of_sets(case.bytes, tensor_bytes(first))
    others = range(1, count)
    return [first, *(case.make(i) if case.vary else copy_of(first) for i in others)]


def copy_of(value: Any, device: torch.device | None = None) -> Any:
    """The same values in tensors of their own, on another device if one is given; what is neither
    tensor nor container is shared."""
    if isinstance(value, Tensor):
        return value.clone() if device is None else value.to(device, copy=True)
    if isinstance(value, dict):
        return {key: copy_of(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copy_of(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(copy_of(item, device) for item in value)
    return value


def tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return 0
    return sum(tensor_bytes(item) for item in value)


def time_in_turns(
    contenders: dict[str, Function],
    sets: list[Any],
    seconds: float,
    shortest: float = SHORTEST_SAMPLE,
) -> dict[str, list[float]]:
    """One list of seconds per call for each contender, index by index from the same round."""
    position = 0

    def sample(function: Function, calls: int) -> float:
        nonlocal position
        start = time.perf_counter()
        for _ in range(calls):
            function(sets[position % len(sets)])
            position += 1
        return (time.perf_counter() - start) / calls

    calls, one_round = {}, 0.0
    for name, function in contenders.items():
        once = sample(function, 1)
        if once < SLOW_CALL:
            once = min(sample(function, 1) for _ in range(3))
        calls[name] = max(1, math.ceil(shortest / once))
        one_round += once * calls[name]
    rounds = max(3 if seconds < 0.5 else 5, min(1000, int(seconds / one_round)))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(rounds):
        for name in order:
            times[name].append(sample(contenders[name], calls[name]))
        order.append(order.pop(0))  # nobody always runs behind the same neighbour
    return times
