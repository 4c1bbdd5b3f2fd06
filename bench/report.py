"""What a run prints: a line per record, and at the end who won and where we lose."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.harness import OUTCOME, label

LOSES_BELOW = 0.95  # nearer than that is a draw

Record = dict[str, Any]


class Duel(NamedTuple):
    """One of our times against one rival's; above 1 the rival takes longer than we do."""

    op: str
    shape: str
    backend: str
    rival: str
    ratio: float


def duels(records: Sequence[Record]) -> list[Duel]:
    return [
        Duel(r["op"], label(r["case"]), r["backend"], rival, ms / r["ms"])
        for r in records
        for rival, ms in r["rivals"].items()
    ]


def row(record: Record) -> str:
    """Time and spread, bytes, bandwidth, share of the roofs, and each rival with its ratio."""
    megabytes, ms = record["bytes"] / 1e6, record["ms"]
    outcome = "".join(
        f", {key.replace('_', ' ')} {record['case'][key]}"
        for key in OUTCOME
        if key in record["case"]
    )
    more = f", {ms / record['read_ms']:.2f}x the read" if "read_ms" in record else ""
    if "arithmetic_ms" in record:
        more += f", {record['arithmetic_ms'] / ms:.0%} of the arithmetic roof"
    rivals = "".join(
        f"  {name} {rival:.4g} ({rival / ms:.2f}x)" for name, rival in record["rivals"].items()
    )
    return (
        f"  {label(record['case'])}: {record['backend']} {ms:.4g} ms "
        f"[{record['p10']:.4g}, {record['p90']:.4g}], {megabytes:.4g} MB, "
        f"{megabytes / ms:.1f} GB/s, {record['roof_ms'] / ms:.0%} of the roof"
        f"{more}{outcome};{rivals}"
    )


def summary(records: Sequence[Record]) -> str:
    """Per op and rival the best and the worst ratio, then every shape where we lose."""
    fought = duels(records)
    if not fought:
        return "nothing was measured"
    groups: dict[tuple[str, str], list[Duel]] = {}
    for duel in fought:
        groups.setdefault((duel.op, duel.rival), []).append(duel)
    widths = [max(len(key[i]) for key in groups) for i in (0, 1)]
    lines = ["", "ratios, rival's time over ours:"]
    for (op, rival), group in groups.items():
        best, worst = (pick(group, key=lambda d: d.ratio) for pick in (max, min))
        middle = statistics.geometric_mean(d.ratio for d in group)
        lines.append(
            f"  {op:<{widths[0]}}  {rival:<{widths[1]}}  mean {middle:5.2f}x of {len(group)}, "
            f"best {best.ratio:.2f}x ({best.shape}), worst {worst.ratio:.2f}x ({worst.shape})"
        )
    return "\n".join([*lines, "", *_losses(fought)])


def _losses(fought: Sequence[Duel]) -> list[str]:
    lost = sorted((d for d in fought if d.ratio < LOSES_BELOW), key=lambda d: (d.op, d.ratio))
    if not lost:
        return [f"we lose nowhere (below {LOSES_BELOW}x)"]
    head = f"we lose (below {LOSES_BELOW}x) {len(lost)} of {len(fought)} comparisons:"
    return [head, *(f"  {d.op} {d.shape}: {d.ratio:.2f}x against {d.rival}" for d in lost)]
