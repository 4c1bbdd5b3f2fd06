"""python -m bench plot FILE.json -o FILE.png: tree_attention over T beside SDPA and the roof."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]
Panels = dict[tuple[Any, ...], list[Record]]
KEYS = ("Hq", "Hkv", "D", "dtype", "B", "ctx")
COLUMNS = 3


class PlotError(Exception):
    """A mistake of the caller, told in one sentence."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench plot", description=__doc__)
    parser.add_argument("input", metavar="FILE.json", help="what --json wrote")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.png")
    args = parser.parse_args(argv)
    try:
        draw(panels(read(args.input)), args.output)
    except PlotError as error:
        print(f"bench plot: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.output}")
    return 0


def read(path: str) -> list[Record]:
    try:
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()]
    except OSError as error:
        raise PlotError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise PlotError(f"{path} does not hold one JSON record a line: {error}") from error


def panels(records: Sequence[Record]) -> Panels:
    """The records of each shape by T, of shapes that were measured at two or more T."""
    groups: Panels = {}
    for record in records:
        if record.get("op") == "tree_attention":
            groups.setdefault(tuple(record["case"][key] for key in KEYS), []).append(record)
    kept = {
        shape: sorted(group, key=lambda r: r["case"]["T"])
        for shape, group in sorted(groups.items())
        if len({r["case"]["T"] for r in group}) > 1
    }
    if not kept:
        raise PlotError("no shape of tree_attention with two or more T: nothing to draw")
    return kept


def curves(group: Sequence[Record]) -> dict[str, tuple[list[int], list[float]]]:
    """T and milliseconds of everyone in one panel."""
    result: dict[str, tuple[list[int], list[float]]] = {}
    for record in group:
        named = {
            f"ours ({record['backend']})": record["ms"],
            **record["rivals"],
            "roof": record["roof_ms"],
        }
        for name, ms in named.items():
            sizes, times = result.setdefault(name, ([], []))
            sizes.append(record["case"]["T"])
            times.append(ms)
    return result


def draw(shapes: Panels, output: str) -> None:
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise PlotError(
            f"needs matplotlib ({error}): pip install 'specdec-kernels[bench]'"
        ) from error
    columns = min(COLUMNS, len(shapes))
    rows = -(-len(shapes) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5 * columns, 3.5 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(shapes) :]:
        axis.set_visible(False)
    for axis, (shape, group) in zip(axes.flat, shapes.items(), strict=False):
        for name, (sizes, times) in curves(group).items():
            style = {"color": "black", "linestyle": "--"} if name == "roof" else {"marker": "o"}
            axis.plot(sizes, times, label=name, **style)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({r["case"]["T"] for r in group}))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_yscale("log")
        hq, hkv, dim, dtype, batch, ctx = shape
        axis.set_title(f"{hq}/{hkv} heads of {dim}, {dtype}, B={batch}, ctx={ctx}", fontsize=10)
        axis.set_xlabel("T")
        axis.set_ylabel("ms")
        axis.legend(fontsize=7)
    facts = next(iter(shapes.values()))[0]
    figure.suptitle(f"tree_attention, {facts['machine']['cpu']}, {facts['threads']} threads")
    try:
        figure.savefig(output, dpi=120)
    except (OSError, ValueError) as error:
        raise PlotError(f"cannot write {output}: {error}") from error
    finally:
        pyplot.close(figure)
