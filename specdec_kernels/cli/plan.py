"""Predict whether a draft pays: its speed-up, the best length, break-even, and its memory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from specdec_kernels import measured, memory, planner
from specdec_kernels.cli.console import CliError, check_json_target, format_table, write_json
from specdec_kernels.cli.options import add_json, real, whole

BAR = 24
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
PLOTTED = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pays = parser.add_argument_group("does it pay?")
    pays.add_argument(
        "--acceptance-rate",
        type=real(0.0, 1.0),
        metavar="A",
        help="chance that a drafted token is right when those before it are",
    )
    pays.add_argument(
        "--num-speculative-tokens", type=whole(0, 1024), metavar="K", help="drafted tokens a step"
    )
    pays.add_argument(
        "--draft-cost",
        type=real(0.0),
        metavar="C",
        help="drafting one token, as a share of a plain decoding step",
    )
    pays.add_argument(
        "--slot-cost",
        type=real(0.0),
        default=0.0,
        metavar="S",
        help="what each drafted token adds to the target's forward, in the same unit (default: 0, "
        "decoding bound by memory)",
    )
    pays.add_argument(
        "--metrics",
        metavar="FILE",
        help="take acceptance, length and cost from what was measured: JSON of specdec generate, "
        "a metrics snapshot, or Prometheus text with vLLM's counters; options given beside it win",
    )
    pays.add_argument("--plot", metavar="FILE.png", help="draw the speed-up over K")
    room = parser.add_argument_group("what does it cost in memory?")
    room.add_argument("--model", metavar="PATH", help="folder of the target, for its KV cache")
    room.add_argument("--draft", metavar="PATH", help="folder or weights file of the draft")
    room.add_argument(
        "--draft-bytes", type=size, metavar="N", help="size of the draft instead, such as 1GB, 1GiB"
    )
    room.add_argument(
        "--kv-dtype", choices=sorted(memory.DTYPE_BYTES), help="of the cache (default: the model's)"
    )
    add_json(parser, "write the plan as JSON")


def size(text: str) -> int:
    """An argparse type: bytes, with a unit if need be."""
    number = text.lower().removesuffix("b").rstrip("kmgi")
    unit = text.lower().removesuffix("b")[len(number) :]
    try:
        value = float(number) * UNITS[unit]
    except (KeyError, ValueError):
        value = 0.0
    if not 1 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"expected a size such as 500MB or 1.5GiB, got {text!r}")
    return int(value)


def run(args: argparse.Namespace) -> int:
    check_json_target(args.json)
    room = _memory(args)
    report = {**_plan(args), **room}
    if args.plot and "speedup" in report:
        _draw(report["table"], args.plot)
    if args.json:
        write_json(report, args.json)
    if args.json != "-":
        print("\n".join(_lines(report)))
    return 0


def _plan(args: argparse.Namespace) -> dict[str, Any]:
    """The arithmetic, {} when only memory was asked for."""
    given: dict[str, Any] = {
        "acceptance_rate": args.acceptance_rate,
        "num_speculative_tokens": args.num_speculative_tokens,
        "draft_cost": args.draft_cost,
    }
    if args.metrics:
        known = _measured(args.metrics)._asdict()
        known["num_speculative_tokens"] = round(known["num_speculative_tokens"])
        given = {name: known[name] if value is None else value for name, value in given.items()}
    missing = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is None]
    if len(missing) == len(given) and args.model and not args.plot:
        return {}
    if missing:
        raise CliError(f"expected {', '.join(missing)}, or --metrics with measured numbers")
    found = planner.plan(**given, slot_cost=args.slot_cost)
    cost = found.draft_cost + found.slot_cost
    longest = max(PLOTTED, found.num_speculative_tokens)
    table = [
        {
            "num_speculative_tokens": k,
            "expected_tokens": planner.expected_tokens(found.acceptance_rate, k),
            "iteration_cost": 1.0 + k * cost,
            "speedup": planner.speedup(found.acceptance_rate, k, cost),
        }
        for k in range(longest + 1)
    ]
    return {**found._asdict(), "advice": planner.advice(found), "table": table}


def _measured(path: str) -> measured.Measured:
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        return measured.read(text)
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}; give --metrics a file") from error
    except ValueError as error:
        raise CliError(f"--metrics {path}: {error}") from error


def _memory(args: argparse.Namespace) -> dict[str, Any]:
    if args.model is None and (args.draft or args.draft_bytes or args.kv_dtype):
        raise CliError("expected --model with --draft, --draft-bytes and --kv-dtype, got none")
    if args.model is None:
        return {}
    if (args.draft is None) == (args.draft_bytes is None):
        raise CliError("expected --draft or --draft-bytes with --model, and not both")
    try:
        kv = memory.kv_size(memory.read_config(Path(args.model).expanduser()), args.kv_dtype)
        draft = args.draft_bytes or memory.weight_bytes(Path(args.draft).expanduser())
    except ValueError as error:
        raise CliError(str(error)) from error
    if kv.per_token == 0:
        raise CliError(f"{args.model} keeps no K and V: nothing is displaced")
    return {"memory": {**memory.displaced(draft, kv), "kv_layout": kv.layout}}


def _lines(report: dict[str, Any]) -> list[str]:
    lines = _plan_lines(report) if "speedup" in report else []
    if "memory" in report:
        found = report["memory"]
        lines += [
            "",
            f"memory     {found['draft_bytes'] / 1e9:.2f} GB of draft weights take the room of "
            f"{found['tokens_lost']:,.0f} tokens",
            f"           ({found['kv_bytes_per_token']:,} bytes of K and V each: "
            f"{found['kv_layout']})",
            f"           {found['conversations_lost']:.1f} conversations of "
            f"{found['conversation_tokens']:,} tokens",
        ]
    return lines[1:] if lines[:1] == [""] else lines


def _plan_lines(report: dict[str, Any]) -> list[str]:
    k, rate = report["num_speculative_tokens"], report["break_even_acceptance_rate"]
    cost = report["break_even_draft_cost"]
    shown = [row for row in report["table"] if row["num_speculative_tokens"] in _shown(k)]
    most = max(row["speedup"] for row in shown)
    rows = [
        [
            str(row["num_speculative_tokens"])
            + (" <" if row["num_speculative_tokens"] == k else ""),
            "#" * max(round(BAR * row["speedup"] / most), 1),
            f"{row['expected_tokens']:.2f}",
            f"{row['iteration_cost']:.2f}",
            f"{row['speedup']:.2f}x",
        ]
        for row in shown
    ]
    return [
        f"acceptance {report['acceptance_rate']:.3f}, {k} drafted tokens, "
        f"{report['draft_cost']:.3f} + {report['slot_cost']:.3f} of a step for each",
        "",
        format_table(["k", "", "tokens a step", "cost", "speed-up"], rows),
        "",
        f"best k     {report['best_k']} ({report['best_speedup']:.2f}x)",
        "break-even "
        + (f"acceptance {rate:.2f}" if rate is not None else "at no acceptance rate")
        + (f", or a draft cost of {cost:.2f}" if cost is not None else ""),
        f"advice     {report['advice']}",
    ]


def _shown(k: int) -> set[int]:
    return {0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, k}


def _draw(table: list[dict[str, float]], path: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CliError("--plot needs matplotlib: pip install 'specdec-kernels[bench]'") from error
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        *zip(*((r["num_speculative_tokens"], r["speedup"]) for r in table), strict=True), "o-"
    )
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set_xlabel("drafted tokens a step")
    axes.set_ylabel("speed-up over plain decoding")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise CliError(f"cannot write {path}: {error}; give --plot a .png file") from error
