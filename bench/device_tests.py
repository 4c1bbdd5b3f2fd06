"""The kernels' own tests on a device, one process per op and path: a kernel that crashes takes the
device's context with it."""

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


def test_files(op: str) -> list[Path]:
    return sorted((ROOT / "tests").glob(f"test_{op.rstrip('_')}*.py"))


def run_all(pairs: Sequence[tuple[str, str]], device: str, quick: bool) -> list[Finding]:
    """The tests of every (op, path), several at a time."""
    end = time.monotonic() + SECONDS

    def run(pair: tuple[str, str]) -> Finding:
        return run_tests(*pair, device, quick, max(end - time.monotonic(), SHORTEST))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(run, pairs))


def run_tests(op: str, path: str, device: str, quick: bool, limit: float) -> Finding:
    """The tests of an op that take the path's backend."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "on_device", "-p", "no:cacheprovider"),
            *("--device", device, "--path", path, "--report", str(report)),
            *(("-k", "not fuzz") if quick else ()),
            *map(str, test_files(op)),
        ]
        paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        try:
            done = subprocess.run(
                command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return Finding(op, path, "tests", f"not done after {limit:.0f} s")
        if not report.exists():
            return Finding(op, path, "tests", _last(done.stdout + done.stderr))
        return _judged(op, path, json.loads(report.read_text(encoding="utf-8")))


def _judged(op: str, path: str, counts: dict) -> Finding:
    failed = counts["failed"]
    detail = f"{counts['passed']} passed, {len(failed)} failed"
    error = None if counts["passed"] else "no test takes this path"
    if failed:
        first = f"{failed[0]['test']}: {failed[0]['error'][:LONGEST_TEXT]}"
        error = f"{detail}; first {first}"
    return Finding(op, path, "tests", error, detail)


def _last(text: str) -> str:
    return f"the process ended without a report: {text.strip()[-LONGEST_TEXT:]}"
