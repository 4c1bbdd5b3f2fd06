"""python -m bench [NAME ...] [--threads N] [--json FILE] [--quick] [--flex] [--list]
python -m bench plot FILE.json -o FILE.png
python -m bench acceptance [--method METHOD] [--json FILE]
python -m bench --device cuda --suite [--quick] [--json FILE] [--markdown FILE] [OP ...]"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from bench import acceptance, plot, suite
from bench.harness import Options, WrongResult, label, measure
from bench.machine import load, machine_line, transformers_version, usable_cpus
from bench.report import row, summary
from bench.roofs import Roofs, measure_roofs
from specdec_kernels.dispatch import why_unavailable

SECONDS = {True: 0.1, False: 0.8}  # per case, by --quick


def available() -> list[str]:
    return sorted(p.stem.removeprefix("bench_") for p in Path(__file__).parent.glob("bench_*.py"))


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, TextIO | None]:
    """The arguments, and the file for --json, open."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measures the ops against their rivals and the limits of the machine.",
        epilog="python -m bench plot FILE.json -o FILE.png draws what --json wrote; "
        "python -m bench acceptance --help: how much of their drafts the drafters see accepted; "
        "--device cuda --suite: the GPU kernels, checked and measured.",
    )
    cpus = usable_cpus()
    parser.add_argument("names", nargs="*", metavar="NAME", help="all when none is given")
    parser.add_argument("--threads", type=int, metavar="N", help="for us and the rivals alike")
    parser.add_argument("--json", metavar="FILE", help="one line per case and backend")
    parser.add_argument("--quick", action="store_true", help="fewer cases, shorter timing")
    parser.add_argument(
        "--flex", action="store_true", help="flex_attention too: minutes of compiling"
    )
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.names) - set(available()))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(available())}")
    if args.threads is not None and not 1 <= args.threads <= cpus:
        parser.error(
            f"--threads: expected 1 to {cpus}, the CPUs of this process, got {args.threads}"
        )
    if args.json is None or args.list:
        return args, None
    try:
        return args, open(args.json, "w", encoding="utf-8")
    except OSError as error:
        parser.error(f"--json: cannot write {args.json}: {error.strerror}")


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "plot":
        return plot.main(argv[1:])
    if argv and argv[0] == "acceptance":
        return acceptance.main(argv[1:])
    if "--suite" in argv:
        return suite.main(argv)
    args, output = parse(argv)
    if args.list:
        print("\n".join(available()))
        return 0
    missing = why_unavailable("cpu", "cpu")
    if missing:
        print(f"bench: no CPU kernels to measure ({missing})", file=sys.stderr)
        return 2
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        return _measure(args, output)
    except BrokenPipeError:  # the reader, head for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _measure(args: argparse.Namespace, output: TextIO | None) -> int:
    """Runs the benchmarks; however that ends, what was measured is summed up."""
    records: list[dict[str, Any]] = []
    code = 0
    try:
        roofs = _introduce()
        names = list(dict.fromkeys(args.names)) or available()
        _run(names, Options(args.quick, args.flex), roofs, records, output)
    except KeyboardInterrupt:
        _say("")
        print("\nstopped; what there is:", flush=True)
        code = 130
    except WrongResult as error:
        _say("")
        print(f"bench: {error}", file=sys.stderr, flush=True)
        code = 1
    finally:
        if output:
            output.close()
        print(summary(records), flush=True)
    return code


def _introduce() -> Roofs:
    print(machine_line())
    if transformers_version() is None:
        print("transformers is missing: no hf_ rivals and no prompt_lookup")
    busy = load()
    if busy is not None and busy > 0.5:
        print(f"load {busy:.1f} before this run: others are busy here, the numbers will be noisy")
    _say("measuring the roofs")
    roofs = measure_roofs(torch.get_num_threads())
    _say("")
    print(roofs.line())
    print("median [10th, 90th percentile]; above 1x the rival takes longer than we do", flush=True)
    return roofs


def _run(
    names: Sequence[str],
    options: Options,
    roofs: Roofs,
    records: list[dict[str, Any]],
    output: TextIO | None,
) -> None:
    """Appends to `records`, prints and writes as it goes."""
    start = time.monotonic()
    for name in names:
        cases = list(importlib.import_module(f"bench.bench_{name}").cases(options))
        print(f"{name}: {len(cases)} cases ({time.monotonic() - start:.0f} s so far)", flush=True)
        for i, case in enumerate(cases):
            elapsed = time.monotonic() - start
            _say(f"[{elapsed:.0f} s] {name} {i + 1}/{len(cases)}: {label(case.shape)}")
            new = measure(name, case, roofs, seconds=SECONDS[options.quick])
            _say("")
            records += new
            for record in new:
                print(row(record), flush=True)
                if output:
                    output.write(json.dumps(record) + "\n")
                    output.flush()
    print(f"{len(records)} records in {time.monotonic() - start:.0f} s")


def _say(text: str) -> None:
    """One line of progress that is rewritten, where someone watches."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
