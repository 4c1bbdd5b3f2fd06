"""What a run of the suite says: lines while it runs, and a page for docs/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.device_tests import Finding
from bench.harness import label
from bench.report import LOSES_BELOW

Record = dict[str, Any]
HEAD = (
    "| op | shape | path | µs | p10 to p90 | MB | GB/s | of copy | rivals, their time over ours |"
)


def finding_line(finding: Finding) -> str:
    mark = "ok  " if finding.passed else "FAIL"
    name = f"{finding.op} {finding.path}"
    return f"  {mark} {name:28} {finding.check:8} {finding.error or finding.detail}"


def record_line(record: Record) -> str:
    name = f"  {record['op']} {label(record['case'])}: {record['path']}"
    if "error" in record:
        return f"{name} FAIL {record['error']}"
    rivals = "".join(f"  {text}" for text in _rivals(record))
    return (
        f"{name} {1e3 * record['ms']:.4g} µs [{1e3 * record['p10']:.4g}, {1e3 * record['p90']:.4g}]"
        f", {record['bytes'] / 1e6:.4g} MB, {record['gb_per_s']:.0f} GB/s, "
        f"{record['of_copy']:.0%} of the copy;{rivals}"
    )


def losses(records: Sequence[Record]) -> list[str]:
    """The shapes where a rival is faster than our best path."""
    best: dict[tuple[str, str], Record] = {}
    for record in records:
        key = record["op"], label(record["case"])
        if "ms" in record and record["ms"] < best.get(key, {"ms": float("inf")})["ms"]:
            best[key] = record
    return [
        f"{op} {shape}: {rival} takes {ms / record['ms']:.2f} of our time ({record['path']})"
        for (op, shape), record in best.items()
        for rival, ms in record["rivals"].items()
        if isinstance(ms, float) and ms < LOSES_BELOW * record["ms"]
    ]


def markdown(facts: dict[str, Any], findings: Sequence[Finding], records: Sequence[Record]) -> str:
    """A page in itself."""
    named = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in facts.items() if k != "device")
    lines = [f"# Benchmarks: {facts['device']}", "", named + ".", ""]
    lines += [
        "Written by `python -m bench --device cuda --suite`. Times are medians of replayed CUDA "
        "graphs over inputs that exceed the L2 cache; bytes are the least that a call has to move, "
        "and the copy is a large one on this device, reads and writes counted.",
        "",
        "## Checks",
        "",
        "| op | path | check | outcome |",
        "|---|---|---|---|",
        *(f"| {f.op} | {f.path} | {f.check} | {_outcome(f)} |" for f in findings),
    ]
    timed = [r for r in records if "ms" in r]
    if timed:
        lines += ["", "## Times", "", HEAD, "|" + "---|" * 9, *map(_row, timed)]
        lost = losses(records)
        lines += ["", "## Where we lose", ""]
        lines += [f"- {line}" for line in lost] or ["Nowhere in this run."]
    return "\n".join(lines) + "\n"


def _row(record: Record) -> str:
    ms, p10, p90 = (1e3 * record[key] for key in ("ms", "p10", "p90"))
    cells = [
        record["op"],
        label(record["case"]),
        record["path"],
        f"{ms:.4g}",
        f"{p10:.4g} to {p90:.4g}",
        f"{record['bytes'] / 1e6:.4g}",
        f"{record['gb_per_s']:.0f}",
        f"{record['of_copy']:.0%}",
        ", ".join(_rivals(record)) or "-",
    ]
    return "| " + " | ".join(cells) + " |"


def _rivals(record: Record) -> list[str]:
    texts = []
    for name, ms in record["rivals"].items():
        outcome = f"{ms / record['ms']:.2f}x" if isinstance(ms, float) else "failed"
        texts.append(f"{name} {outcome}{' (eager)' if name in record['eager'] else ''}")
    return texts


def _outcome(finding: Finding) -> str:
    if finding.error is None:
        return f"passed: {finding.detail}"
    return " ".join(finding.error.split()).replace("|", "\\|")[:300]
