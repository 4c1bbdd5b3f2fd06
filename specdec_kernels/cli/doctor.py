"""Say what is installed and test every op; with --draft, say why a draft is hardly accepted."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

from specdec_kernels import __version__, native, proven
from specdec_kernels.cli import machine, selftest
from specdec_kernels.cli import model as models
from specdec_kernels.cli.console import CliError, check_json_target, write_json
from specdec_kernels.cli.options import DTYPES, add_json, whole

DRAFT_OPTIONS = (
    "target", "prompt", "file", "max_new_tokens", "num_speculative_tokens", "dtype", "threads"
)  # fmt: skip
NOTHING_PROVEN = "nothing yet, python -m bench --device cuda --suite does that"
OPENMP = ("libgomp", "libiomp5", "libomp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_draft_options(parser)
    add_json(parser, "write the findings as JSON")


def run(args: argparse.Namespace) -> int:
    check_json_target(args.json)
    check_draft_options(args)
    if args.draft is not None:
        from specdec_kernels.cli import doctor_draft  # it needs transformers

        return doctor_draft.run(args)
    report = examine()
    if args.json:
        write_json(report, args.json)
    if args.json != "-":
        print("\n".join(_lines(report)))
    return 0 if report["passed"] else 1


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "drafts",
        "Checks a draft checkpoint against its target and measures how much of its drafts is "
        "accepted, read as the loader does and by other conventions; exit code 1 for an error, "
        "another convention that drafts clearly better among them.",
    )
    group.add_argument(
        "--draft", metavar="PATH_OR_ID", help="EAGLE or Medusa heads, MTP layers or a model"
    )
    group.add_argument(
        "--target",
        metavar="PATH_OR_ID",
        help="what it drafts for (default: the packaged SmolLM2-135M-Instruct)",
    )
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="default: three of ours")
    source.add_argument("--file", metavar="PATH", help="a file with the prompt ('-': stdin)")
    group.add_argument("--max-new-tokens", type=whole(1), metavar="N", help="default: 64 a prompt")
    group.add_argument(
        "--num-speculative-tokens", type=whole(1), metavar="K", help="drafted a step (default: 3)"
    )
    group.add_argument("--dtype", choices=DTYPES, help="default: bf16")
    group.add_argument("--threads", type=whole(1, os.cpu_count()), metavar="N", help="CPU threads")


def check_draft_options(args: argparse.Namespace) -> None:
    for name in DRAFT_OPTIONS if args.draft is None else ():
        if getattr(args, name) is not None:
            raise CliError(f"--{name.replace('_', '-')} belongs to --draft, got none")


def examine() -> dict[str, Any]:
    """Everything that doctor prints, as a dictionary."""
    facts = machine.describe()
    tests = selftest.run()
    versions = {name: facts[name] for name in ("specdec_kernels", "python", "torch")}
    versions |= {name: machine.version_of(name) for name in ("transformers", "triton")}
    return {
        "versions": versions,
        "machine": facts,
        "openmp": openmp_runtimes(),
        "backends": backends(),
        "proven": proven_paths(),
        "model_package": models.package_missing() or "installed",
        "self_test": tests,
        "passed": bool(tests) and all(test["passed"] for test in tests),
    }


def backends() -> dict[str, str]:
    """Each backend: "available", or why it is not."""
    cpu = native.cpu_error and f"{native.cpu_error}; every op runs on the reference path"
    state = {
        "reference": "available",
        "cpu": cpu or f"available ({machine.isa_in_use()})",
    }
    no_device = None if torch.cuda.is_available() else "torch sees no CUDA device"
    for name, missing in (("triton", native.triton_error), ("cuda", native.cuda_error)):
        reasons = [reason for reason in (missing, no_device) if reason]
        state[name] = "; ".join(reasons) or "available"
    return state


def proven_paths() -> dict[str, dict[str, list[str]]]:
    """By CUDA device and op, the paths whose suite has passed there: they run by themselves."""
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return {
        f"{device} {torch.cuda.get_device_name(device)}": proven.proven_on(device)
        for device in devices
    }


def openmp_runtimes() -> list[str]:
    """The OpenMP libraries in this process. More than one compete for the same cores."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as file:
            paths = {line.split()[-1] for line in file if ".so" in line}
    except OSError:
        return []
    return sorted(p for p in paths if os.path.basename(p).startswith(OPENMP))


def _lines(report: dict[str, Any]) -> list[str]:
    facts = report["machine"]
    named = [f"{name} {version or 'missing'}" for name, version in report["versions"].items()]
    flags = " ".join(facts["cpu_flags"]) or "unknown"
    runtimes = report["openmp"]
    lines = [
        f"specdec-kernels {__version__}",
        f"versions   {', '.join(named)}",
        f"cpu        {facts['cpu']}, {facts['cpus']} CPUs, {facts['threads']} threads",
        f"isa        in use: {facts['isa']}; the CPU has: {flags}",
        f"openmp     {', '.join(runtimes) or 'none found'}",
    ]
    if len(runtimes) > 1:
        lines.append("           more than one OpenMP runtime is loaded: threads may compete")
    lines += [f"{'backend' if i == 0 else '':10} {name}: {state}"
              for i, (name, state) in enumerate(report["backends"].items())]  # fmt: skip
    for device, found in report["proven"].items():
        known = "; ".join(f"{op}: {', '.join(paths)}" for op, paths in found.items())
        lines.append(f"proven     {device}: {known or NOTHING_PROVEN}")
    lines += [f"model      {report['model_package']}", "self-test"]
    for test in report["self_test"]:
        mark = "ok  " if test["passed"] else "FAIL"
        lines.append(f"  {mark} {test['op']:18} {test['backend']:10} {test['detail']}")
    lines.append("all self-tests passed" if report["passed"] else "SOME SELF-TESTS FAILED")
    return lines
