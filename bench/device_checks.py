"""What a kernel must do on a device beside being right: run in a recording, and never wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from bench.device_tests import LONGEST_TEXT, Finding
from bench.harness import Case, Function, label
from specdec_kernels import proven
from specdec_kernels.dispatch import use_backend


def on_path(path: str, run: Function) -> Function:
    """`run` with every op of ours on this path."""

    def call(inputs: Any) -> Any:
        with proven.trying("cuda-hopper", path == "cuda-hopper"), use_backend(path.split("-")[0]):
            return run(inputs)

    return call


def check_cases(device: Any, op: str, path: str, cases: Iterable[Case]) -> list[Finding]:
    """One finding per check; the first case that fails names it, and what follows is left out."""
    errors: dict[str, str | None] = dict.fromkeys(CHECKS)
    count = 0
    for case in cases:
        count += 1
        for name, check in CHECKS.items():
            if errors[name] is None:
                errors[name] = _error_of(check, device, case, on_path(path, case.run))
    detail = f"{count} shapes"
    return [Finding(op, path, name, error, detail) for name, error in errors.items()]


def _error_of(check: Callable, device: Any, case: Case, run: Function) -> str | None:
    try:
        check(device, case, run)
        device.synchronize()
    except Exception as error:  # whatever goes wrong is what the suite has to report
        return f"{label(case.shape)}: {error_text(error)}"
    return None


def error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST_TEXT]}"


def agrees(device: Any, case: Case, run: Function) -> None:
    """The result is the reference's, which runs on the device too."""
    inputs = case.make(0)
    case.check(run(device.move(inputs)), case.reference(device.move(inputs)))


def replays(device: Any, case: Case, run: Function) -> None:
    """A recording gives, bit for bit, for other inputs what a call gives for them."""
    static, other = device.move(case.make(0)), case.make(1)
    captured = device.capture(lambda: run(static))
    expected = run(device.move(other))
    assign(static, other)
    captured.replay()
    device.synchronize()
    torch.testing.assert_close(captured.outputs, expected, rtol=0, atol=0, equal_nan=True)


def never_waits(device: Any, case: Case, run: Function) -> None:
    inputs = device.move(case.make(0))
    run(inputs)  # compiles what is compiled at the first call
    with device.no_sync():
        run(inputs)


CHECKS = {"result": agrees, "graph": replays, "no sync": never_waits}


def assign(target: Any, source: Any) -> None:
    """The values of `source` into the tensors of `target`, of the same shapes."""
    if isinstance(target, Tensor):
        target.copy_(source)
    elif isinstance(target, dict):
        for key, value in target.items():
            assign(value, source[key])
    elif isinstance(target, (list, tuple)):
        for mine, theirs in zip(target, source, strict=True):
            assign(mine, theirs)
