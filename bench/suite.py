"""python -m bench --device cuda --suite [--quick] [--json FILE] [--markdown FILE] [OP ...]

Everything that can be said about the GPU kernels where there is a GPU, in under ten minutes: their
tests, recordings as CUDA graphs, no waiting for the device, and times against rivals. A path that
passes all checks is recorded as proven and runs by itself from then on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import device_report, device_tests
from bench.device import CudaDevice
from bench.device_cases import MEASURED, checked
from bench.device_checks import check_cases, error_text
from bench.device_tests import Finding
from bench.device_times import measure
from bench.harness import Case, Options
from specdec_kernels import proven
from specdec_kernels.dispatch import GPU_BACKENDS, IMPLEMENTATIONS, why_unavailable

SECONDS = 540  # no new shape is measured after that


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Checks and measures the GPU kernels; exit code 1 when a check fails, 2 "
        "without a CUDA device.",
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="all when none is given")
    parser.add_argument("--device", default="cuda", help="cuda, or cuda:N")
    parser.add_argument("--suite", action="store_true", required=True)
    parser.add_argument("--json", metavar="FILE", help="one line per check and per time")
    parser.add_argument("--markdown", metavar="FILE", help="a page for docs/")
    parser.add_argument("--quick", action="store_true", help="fewer tests, fewer shapes")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.ops) - set(MEASURED))
    if unknown:
        parser.error(f"no op {', '.join(unknown)}; there are {', '.join(MEASURED)}")
    if not args.device.startswith("cuda"):
        parser.error(f"--device: expected cuda or cuda:N, got {args.device}")
    return args


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    try:
        device = CudaDevice(args.device)
    except RuntimeError as error:
        print(f"bench: --suite needs a CUDA device: {error}", file=sys.stderr)
        return 2
    return Suite(device, args).run()


class Suite:
    def __init__(self, device: Any, args: argparse.Namespace):
        self.device, self.args = device, args
        self.pairs = list(pairs(device, args.ops or list(MEASURED)))
        self.findings: list[Finding] = []
        self.records: list[dict[str, Any]] = []
        self.started = time.monotonic()

    @torch.inference_mode()
    def run(self) -> int:
        """The exit code: 0 when every check passed."""
        facts = self.device.facts()
        print(", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items()))
        if not self.pairs:
            print("bench: no GPU kernels are installed for these ops", file=sys.stderr)
            return 2
        try:
            self._stage("tests", self._test)
            self._stage("recordings and waiting", self._check)
            self._record()
            self._stage("times", self._time)
        finally:
            self._write(facts)
        lost = device_report.losses(self.records)
        print("\n".join(["where we lose:", *lost] if lost else ["we lose nowhere"]))
        return 0 if all(self.passed().values()) and not self._broken() else 1

    def passed(self) -> dict[tuple[str, str], bool]:
        """Of every (op, path), whether all checks did."""
        return {
            pair: all(f.passed for f in self.findings if (f.op, f.path) == pair)
            for pair in self.pairs
        }

    def _record(self) -> None:
        """A quick run leaves tests out, so it proves nothing; what fails in it fails."""
        results = self.passed()
        if self.args.quick:
            results = {pair: passed for pair, passed in results.items() if not passed}
        try:
            proven.record(results, self.device.device)
        except OSError as error:
            print(f"bench: what is proven cannot be kept: {error}", file=sys.stderr)

    def _broken(self) -> bool:
        return any("error" in record for record in self.records)

    def _stage(self, name: str, stage: Callable[[], None]) -> None:
        print(f"{name} ({time.monotonic() - self.started:.0f} s so far)", flush=True)
        stage()

    def _test(self) -> None:
        self._add(device_tests.run_all(self.pairs, str(self.device.device), self.args.quick))

    def _check(self) -> None:
        """Not of what failed its tests: a crash would take this process with it."""
        passed = self.passed()
        for op, path in filter(passed.get, self.pairs):
            self._add(check_cases(self.device, op, path, checked(op)))

    def _add(self, findings: Sequence[Finding]) -> None:
        self.findings += findings
        for finding in findings:
            print(device_report.finding_line(finding), flush=True)

    def _time(self) -> None:
        """Only paths that are right are worth a time."""
        passed = self.passed()
        gb_per_s = self.device.copy_gb_per_s()
        print(f"  the copy moves {gb_per_s:.0f} GB/s", flush=True)
        options = Options(self.args.quick, flex=not self.args.quick)
        for op in dict.fromkeys(op for op, _ in self.pairs):
            paths = [path for name, path in self.pairs if name == op and passed[op, path]]
            for case in MEASURED[op](options) if paths else ():
                if time.monotonic() - self.started > SECONDS:
                    print("  the time is over; what there is:", flush=True)
                    return
                self._time_case(op, case, paths, gb_per_s)

    def _time_case(self, op: str, case: Case, paths: list[str], gb_per_s: float) -> None:
        try:
            new = measure(self.device, op, case, paths, gb_per_s, self.args.quick)
        except Exception as error:  # too little memory, or a device that is gone
            new = [{"op": op, "path": ", ".join(paths), "case": dict(case.shape),
                    "error": error_text(error)}]  # fmt: skip
        self.records += new
        for record in new:
            print(device_report.record_line(record), flush=True)

    def _write(self, facts: dict[str, Any]) -> None:
        if self.args.json:
            lines = [{"facts": facts}, *(f._asdict() for f in self.findings), *self.records]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            Path(self.args.json).write_text(text, encoding="utf-8")
        if self.args.markdown:
            page = device_report.markdown(facts, self.findings, self.records)
            Path(self.args.markdown).write_text(page, encoding="utf-8")


def pairs(device: Any, ops: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every op and path that can run on the device. An implementation names further paths that it
    takes when they are proven in its attribute `paths`."""
    for op in ops:
        for backend in GPU_BACKENDS:
            implementation = IMPLEMENTATIONS[op].get(backend)
            if implementation is None or why_unavailable(backend, device.device.type):
                continue
            for path in getattr(implementation, "paths", (backend,)):
                if path != "cuda-hopper" or device.capability[0] == 9:
                    yield op, path
