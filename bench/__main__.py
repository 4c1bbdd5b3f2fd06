"""python -m bench [NAME ...] [--threads N] [--json FILE] [--quick] [--list]"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import torch

from bench.harness import machine, machine_line, measure, table_row
from specdec_kernels.dispatch import why_unavailable


def available() -> list[str]:
    return sorted(p.stem.removeprefix("bench_") for p in Path(__file__).parent.glob("bench_*.py"))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks of the ops.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="all when none is given")
    parser.add_argument("--threads", type=int, help="threads for us and the rivals alike")
    parser.add_argument("--json", type=Path, metavar="FILE", help="one line per case and backend")
    parser.add_argument("--quick", action="store_true", help="fewer cases, shorter timing")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.names) - set(available()))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(available())}")
    if args.threads is not None and args.threads < 1:
        parser.error(f"--threads: expected at least 1, got {args.threads}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.list:
        print("\n".join(available()))
        return 0
    if args.threads:
        torch.set_num_threads(args.threads)
    missing = why_unavailable("cpu", "cpu")
    if missing:
        print(f"bench: the CPU kernels are missing ({missing}); reinstall with a C++ compiler")
        return 2
    print(machine_line())
    print("median [p10, p90]; a ratio above 1 means that the rival takes longer than we do")
    output = args.json.open("w") if args.json else None
    for name in args.names or available():
        print(name)
        module = importlib.import_module(f"bench.bench_{name}")
        for case in module.cases(args.quick):
            for record in measure(name, case, seconds=0.1 if args.quick else 1.0):
                print(table_row(record), flush=True)
                if output:
                    output.write(json.dumps({**record, "machine": machine()}) + "\n")
                    output.flush()
    if output:
        output.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
