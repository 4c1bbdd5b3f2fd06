"""The kernels' own tests on a device, one process per file of them and path: a kernel that crashes
takes the device's context with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
AT_ONCE = max(1, min(8, (os.cpu_count() or 1) // 2))
SECONDS = 240  # for all of them
SHORTEST = 20
LONGEST_TEXT = 600


class Finding(NamedTuple):
    """What one check found; `error` is None when it passed."""

    op: str
    path: str
    check: str
    error: str | None
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.error is None


class Outcome(NamedTuple):
    """Of one process: tests that passed, and the errors of the others."""

    passed: int
    failed: tuple[str, ...]


def test_files(op: str) -> list[Path]:
    return sorted((ROOT / "tests").glob(f"test_{op.rstrip('_')}*.py"))


def run_all(pairs: Sequence[tuple[str, str]], device: str, quick: bool) -> list[Finding]:
    """One finding per (op, path); a process per file of tests, several at a time."""
    end = time.monotonic() + SECONDS
    units = [(op, path, file) for op, path in pairs for file in test_files(op)]

    def run(unit: tuple[str, str, Path]) -> Outcome:
        _, path, file = unit
        return run_file(file, path, device, quick, max(end - time.monotonic(), SHORTEST))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(run, units))
    return [
        judged(*pair, [o for unit, o in zip(units, outcomes, strict=True) if unit[:2] == pair])
        for pair in pairs
    ]


def run_file(file: Path, path: str, device: str, quick: bool, limit: float) -> Outcome:
    """The tests of a file that take the path's backend."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "on_device", "-p", "no:cacheprovider"),
            *("--device", device, "--path", path, "--report", str(report)),
            *(("-k", "not fuzz") if quick else ()),
            str(file),
        ]
        try:
            done = subprocess.run(
                command,
                env=_environment(),
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            return Outcome(0, (f"{file.name}: not done after {limit:.0f} s",))
        if not report.exists():
            text = (done.stdout + done.stderr).strip()[-LONGEST_TEXT:]
            return Outcome(0, (f"{file.name}: the process ended without a report: {text}",))
        counts = json.loads(report.read_text(encoding="utf-8"))
        failed = (f"{f['test']}: {f['error'][:LONGEST_TEXT]}" for f in counts["failed"])
        return Outcome(counts["passed"], tuple(failed))


def _environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    threads = str(max(1, (os.cpu_count() or 1) // AT_ONCE))  # the references run on the CPU
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return {"OMP_NUM_THREADS": threads, **os.environ, **own}


def judged(op: str, path: str, outcomes: Sequence[Outcome]) -> Finding:
    failed = [error for outcome in outcomes for error in outcome.failed]
    passed = sum(outcome.passed for outcome in outcomes)
    detail = f"{passed} passed, {len(failed)} failed"
    error = None if passed else "no test takes this path"
    if failed:
        error = f"{detail}; first {failed[0]}"
    return Finding(op, path, "tests", error, detail)
