"""Measure whether drafting pays: methods and rivals over workloads, numbers of rows, sampling."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import specdec_kernels as sdk
from specdec_kernels.cli import machine
from specdec_kernels.cli import model as models
from specdec_kernels.cli.bench import report
from specdec_kernels.cli.bench.contestants import Contestant, assemble
from specdec_kernels.cli.bench.sweep import Records, cells, missing, record_of
from specdec_kernels.cli.bench.workloads import OURS, read_prompts, rows_of
from specdec_kernels.cli.console import CliError, Progress
from specdec_kernels.cli.options import DTYPES, add_common, method_with_options, threads, whole

DEFAULT_METHODS = ("ngram", "suffix")
SAMPLINGS = ("greedy", "sampled")
CONCURRENCY = (1, 4, 10, 20)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--method",
        action="append",
        metavar="METHOD[:KEY=VALUE,...]",
        help="a method of ours with options of patch, such as eagle3:model=PATH; may be repeated "
        f"(default: {' and '.join(DEFAULT_METHODS)})",
    )
    add(
        "--concurrency",
        type=whole(1, 4096),
        nargs="+",
        default=list(CONCURRENCY),
        metavar="N",
        help="rows at once (default: %(default)s)",
    )
    add("--workload", action="append", metavar="NAME", help="default: all; may be repeated")
    add(
        "--prompts",
        type=Path,
        default=OURS,
        metavar="FILE",
        help='prompts of your own, a JSON object a line: {"prompt": TEXT, "workload": NAME}',
    )
    add("--sampling", choices=SAMPLINGS, action="append", help="default: both; may be repeated")
    add("--max-new-tokens", type=whole(2), default=128, metavar="N", help="a row (%(default)s)")
    add("--repeats", type=whole(1), default=3, metavar="N", help="runs of each (%(default)s)")
    add("--dtype", choices=DTYPES, default="bf16", help="default: %(default)s")
    add("--assistant", metavar="MODEL", help="a draft model for transformers' assisted generation")
    add("--no-compile", action="store_true", help="leave out plain with a static cache, compiled")
    add(
        "--out",
        type=Path,
        default=Path("specdec-bench"),
        metavar="FOLDER",
        help="for records.jsonl, table.md, pictures and report.html; a sweep that was stopped goes "
        "on there (default: %(default)s)",
    )
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    methods = {text: _options(text) for text in args.method or DEFAULT_METHODS}
    chosen = _workloads(args)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(f"cannot make {args.out}: {error.strerror}; give --out a folder") from error
    progress = Progress()
    with threads(args.threads):
        model, tokenizer, name = models.load(args.model, DTYPES[args.dtype], progress)
        support = sdk.support(model)
        if not support.ok:
            raise CliError(f"{name} cannot be drafted for ({support.reason}): take another")
        assistant = (
            args.assistant
            and models.load(args.assistant, DTYPES[args.dtype], progress, "--assistant")[0]
        )
        settings = {
            "model": name,
            "dtype": args.dtype,
            "max_new_tokens": args.max_new_tokens,
            "machine": {k: v for k, v in machine.describe().items() if k not in ("line", "date")},
        }
        records = Records(args.out / "records.jsonl", settings)
        with assemble(model, methods, assistant, not args.no_compile) as everyone:
            _sweep(args, chosen, everyone, tokenizer, records, progress)
    progress.clear()
    return _report(records, list(methods), args.out)


def _options(text: str) -> dict[str, Any]:
    try:
        return method_with_options(text)
    except ValueError as error:
        raise CliError(f"--method {text}: {error}") from error


def _workloads(args: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    known = read_prompts(args.prompts)
    wanted = args.workload or list(known)
    for name in wanted:
        if name not in known:
            raise CliError(f"--workload: expected one of {', '.join(known)}, got {name!r}")
    return {name: known[name] for name in wanted}


def _sweep(
    args: argparse.Namespace,
    chosen: Mapping[str, Sequence[str]],
    everyone: Sequence[Contestant],
    tokenizer: Any,
    records: Records,
    progress: Progress,
) -> None:
    todo = cells(list(chosen), args.sampling or SAMPLINGS, args.concurrency)
    left = list(missing(todo, everyone, args.repeats, records))
    warm: set[tuple[Any, ...]] = set()
    started = time.monotonic()
    for number, (cell, repeat, contestant) in enumerate(left):
        inputs = encode(tokenizer, rows_of(chosen[cell.workload], cell.concurrency))
        spent = time.monotonic() - started
        minutes = spent / max(number, 1) * (len(left) - number) / 60
        rest = f", about {minutes:.0f} min left" if number else ""
        progress.say(
            f"{number + 1}/{len(left)}: {cell.workload}, {cell.sampling}, {cell.concurrency} rows, "
            f"{contestant.name}, run {repeat + 1}{rest}"
        )
        shape = cell if contestant.compiles else cell.concurrency
        if (contestant.name, shape) not in warm:
            tokens = args.max_new_tokens if contestant.compiles else min(8, args.max_new_tokens)
            contestant.run(inputs, tokens, cell.sampling == "sampled")
            warm.add((contestant.name, shape))
        records.add(record_of(cell, repeat, contestant, inputs, args.max_new_tokens))


def encode(tokenizer: Any, texts: Sequence[str]) -> dict[str, Tensor]:
    """Left-padded, in the chat template where there is one."""
    if tokenizer.chat_template:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
            for text in texts
        ]
    bare = bool(tokenizer.chat_template)  # the template has set the special tokens
    rows = [tokenizer(text, add_special_tokens=not bare)["input_ids"] for text in texts]
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def _report(records: Records, ours: Sequence[str], out: Path) -> int:
    found = report.rows(records.records)
    text = report.table(found)
    settings = {**machine.describe(), **{"records": records.path.name}}
    pictures = report.plots(found)
    (out / "table.md").write_text(f"{text}\n\n{settings['line']}\n", encoding="utf-8")
    (out / "report.html").write_text(report.page(found, pictures, settings), encoding="utf-8")
    for name, png in pictures.items():
        (out / f"{name}.png").write_bytes(png)
    print(text)
    print(f"\n{settings['line']}\nwritten to {out}")
    if not pictures:
        print("no pictures: pip install 'specdec-kernels[bench]'", file=sys.stderr)
    for row in report.losses(found, ours):
        print(
            f"slower than plain: {row.method}, {row.workload}, {row.sampling}, "
            f"{row.concurrency} rows: {row.speedup:.2f}x"
        )
    return 0
