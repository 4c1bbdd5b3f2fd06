"""What a sweep's records say: medians, speed-ups, predictions; as a table, plots and one page."""

from __future__ import annotations

import base64
import html
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specdec_kernels import measured, planner
from specdec_kernels.cli.bench.sweep import CELL, Record
from specdec_kernels.cli.console import format_table

HEADER = (
    "work", "method", "rows", "ms/token", "tokens/s", "speed-up", "predicted", "accepted",
    "tokens/forward",
)  # fmt: skip
STYLE = """body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em }
table { border-collapse: collapse } td, th { padding: .2em .7em; text-align: right }
td:nth-child(-n+2), th:nth-child(-n+2) { text-align: left }
tr:nth-child(even) { background: #f3f3f3 }
th { border-bottom: 2px solid #999 } .lost { color: #b00020 } img { max-width: 100% }"""


class Row(NamedTuple):
    """One method in one cell: medians over the repeats. None: not known."""

    workload: str
    sampling: str
    concurrency: int
    method: str
    time_per_output_token: float
    tokens_per_second: float
    speedup: float | None
    predicted: float | None
    acceptance_rate: float | None
    mean_acceptance_length: float | None


def rows(records: Sequence[Record]) -> list[Row]:
    """By cell, in the order of the records. The speed-up is the median over repeats of what plain
    took to what this method took in the same one."""
    by_method: dict[tuple[Any, ...], dict[str, dict[int, Record]]] = {}
    for record in records:
        cell = tuple(record[name] for name in CELL)
        runs = by_method.setdefault(cell, {}).setdefault(record["method"], {})
        runs[record["repeat"]] = record
    return [
        _row(cell, method, runs, methods.get("plain", {}))
        for cell, methods in by_method.items()
        for method, runs in methods.items()
    ]


def _row(
    cell: tuple[Any, ...], method: str, runs: Mapping[int, Record], plain: Mapping[int, Record]
) -> Row:
    def median(name: str) -> float | None:
        values = [run[name] for run in runs.values() if run[name] is not None]
        return statistics.median(values) if values else None

    both = [(plain[i], run) for i, run in runs.items() if i in plain]
    ratios = [run["tokens_per_second"] / base["tokens_per_second"] for base, run in both]
    predictions = [p for p in (predicted(run, base) for base, run in both) if p is not None]
    time, speed = median("time_per_output_token"), median("tokens_per_second")
    assert time is not None and speed is not None
    workload, sampling, concurrency = cell
    return Row(
        workload,
        sampling,
        concurrency,
        method,
        time,
        speed,
        statistics.median(ratios) if ratios else None,
        statistics.median(predictions) if predictions else None,
        median("acceptance_rate"),
        median("mean_acceptance_length"),
    )


def predicted(run: Record, plain: Record) -> float | None:
    """The arithmetic of the planner, fed with this run's acceptance, its prefill, and the costs of
    its drafted tokens in units of plain's step; steps without a draft count as plain's."""
    counts = run["metrics"]
    if not counts or not counts["num_steps"]:
        return None
    if not counts["num_draft_tokens"]:
        return 1.0
    found = measured.read(json.dumps(counts))
    k, seconds = found.num_speculative_tokens, counts["seconds"]
    steps = plain["seconds"] - seconds["prefill"]
    step = steps / (plain["new_tokens"] / plain["concurrency"])
    if step <= 0.0:
        return None
    drafting = counts["num_drafts"] / counts["num_row_steps"]
    verify = seconds["verify"] / counts["num_steps"] / step
    draft = seconds["draft"] / counts["num_steps"] / step
    cost = max((verify - 1.0 + draft) / (drafting * k), 0.0)
    tokens = 1.0 - drafting + drafting * planner.tokens_of_mean(found.acceptance_rate, k)
    ratio = tokens / (1.0 + drafting * k * cost)
    return plain["seconds"] / (seconds["prefill"] + steps / ratio)


def table(found: Sequence[Row]) -> str:
    """In Markdown."""
    return format_table(HEADER, [_cells(row) for row in found])


def _cells(row: Row) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return [
        f"{row.workload}, {row.sampling}",
        row.method,
        str(row.concurrency),
        f"{1e3 * row.time_per_output_token:.1f}",
        f"{row.tokens_per_second:.1f}",
        number(row.speedup, ".2f") + "x" * (row.speedup is not None),
        number(row.predicted, ".2f") + "x" * (row.predicted is not None),
        number(row.acceptance_rate, ".0%"),
        number(row.mean_acceptance_length, ".2f"),
    ]


def losses(found: Sequence[Row], ours: Sequence[str]) -> list[Row]:
    """Where a method of ours is slower than plain."""
    return [r for r in found if r.method in ours and r.speedup is not None and r.speedup < 1.0]


def plots(found: Sequence[Row]) -> dict[str, bytes]:
    """PNG pictures by name; none without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return {}
    kinds = list(dict.fromkeys((row.workload, row.sampling) for row in found))
    figure = Figure(figsize=(5 * min(len(kinds), 3), 4 * -(-len(kinds) // 3)), layout="constrained")
    all_axes = figure.subplots(-(-len(kinds) // 3), min(len(kinds), 3), squeeze=False).flat
    for axes, (workload, sampling) in zip(all_axes, kinds, strict=False):
        own = [row for row in found if (row.workload, row.sampling) == (workload, sampling)]
        for method in dict.fromkeys(row.method for row in own):
            points = [(r.concurrency, r.speedup) for r in own if r.method == method and r.speedup]
            if points:
                axes.plot(*zip(*points, strict=True), "o-", label=method)
        axes.axhline(1.0, color="grey", linewidth=1)
        axes.set_title(f"{workload}, {sampling}")
        axes.set_xlabel("rows at once")
        axes.set_ylabel("speed-up over plain")
    all_axes[0].legend(fontsize="small")
    scatter = Figure(figsize=(5, 5), layout="constrained")
    axes = scatter.subplots()
    pairs = [(r.predicted, r.speedup) for r in found if r.predicted and r.speedup]
    if pairs:
        axes.scatter(*zip(*pairs, strict=True), s=16)
        axes.axline((1.0, 1.0), slope=1.0, color="grey", linewidth=1)
    axes.set_xlabel("predicted speed-up")
    axes.set_ylabel("measured speed-up")
    return {"speedup": _png(figure), "predicted": _png(scatter)}


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def page(found: Sequence[Row], pictures: Mapping[str, bytes], settings: Mapping[str, Any]) -> str:
    """One HTML page that needs nothing else."""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in HEADER)
    lines = []
    for row in found:
        lost = row.speedup is not None and row.speedup < 1.0 and row.method != "plain"
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(row))
        lines.append(f"<tr{' class=lost' * lost}>{cells}</tr>")
    images = "".join(
        f'<p><img alt="{name}" src="data:image/png;base64,{base64.b64encode(png).decode()}"></p>'
        for name, png in pictures.items()
    )
    facts = "".join(
        f"<li>{html.escape(str(k))}: {html.escape(str(v))}</li>" for k, v in settings.items()
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>specdec bench</title>'
        f"<style>{STYLE}</style><h1>Does speculation pay?</h1><ul>{facts}</ul>{images}"
        f"<table><tr>{head}</tr>{''.join(lines)}</table></html>\n"
    )
