"""Watch a real model answer three prompts faster, with the same tokens."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import specdec_kernels as sdk
from specdec_kernels.cli import demo_size, machine, runs
from specdec_kernels.cli import model as models
from specdec_kernels.cli.console import (
    CliError,
    Progress,
    check_json_target,
    format_table,
    write_json,
)
from specdec_kernels.cli.options import DTYPES, add_common, add_json, threads, whole
from specdec_kernels.cli.prompts import PROMPTS

BUDGET = 105.0  # seconds for everything, so that two minutes hold on 2 cores
SHARE = {"bf16": 1.0, "fp16": 1.0, "fp32": 0.6}  # of that, where several are measured
MAX_REPEATS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [prompt.name for prompt in PROMPTS]
    parser.add_argument(
        "--dtype", choices=DTYPES, action="append", help="default: bf16 and fp32; may be repeated"
    )
    parser.add_argument(
        "--prompt", choices=names, action="append", help="default: all three; may be repeated"
    )
    parser.add_argument(
        "--max-new-tokens", type=whole(1), metavar="N", help="default: what two minutes allow"
    )
    parser.add_argument(
        "--repeats", type=whole(1), metavar="N", help="default: 1 to 3, as time allows"
    )
    parser.add_argument(
        "--draft",
        metavar="PATH",
        help="one more run each, with this draft model or head: a folder or a Hub id",
    )
    add_common(parser)
    add_json(parser, "write machine and rows as JSON")


@dataclass
class Cell:
    """One prompt in one dtype: the runs of every method so far."""

    prompt: str
    dtype: str
    input_ids: torch.Tensor
    new_tokens: int
    runs: dict[str, list[runs.Run]] = field(default_factory=dict)
    gaps: dict[tuple[int, ...], float] = field(default_factory=dict)

    def seconds(self) -> float:
        """What one more round would take."""
        return sum(done[-1].seconds for done in self.runs.values())


def run(args: argparse.Namespace) -> int:
    check_json_target(args.json)
    start, progress = time.monotonic(), Progress()
    chosen = list(dict.fromkeys(args.dtype or ("bf16", "fp32")))
    cells: list[Cell] = []
    name = ""
    with threads(args.threads), contextlib.ExitStack() as stack:
        stack.callback(progress.clear)
        for i, dtype in enumerate(chosen):
            model, tokenizer, name = models.load(args.model, DTYPES[dtype], progress)
            support = sdk.support(model)
            if not support.ok:
                raise CliError(f"{name} cannot be drafted for ({support.reason}): take another")
            left = BUDGET - (time.monotonic() - start)
            share = SHARE[dtype] / sum(SHARE[other] for other in chosen[i:])
            deadline = time.monotonic() + left * share
            with _contest(model, args.draft) as contest:
                cells += _measure(contest, tokenizer, dtype, args, deadline, progress)
        facts = {**machine.describe(), "model": name}
    rows = [row for cell in cells for row in _rows(cell)]
    to_stderr = args.json == "-"
    text = f"{_table(rows)}\n\n{name}, greedy. {facts['line']}\n{_verdict(rows)}"
    print(text, file=sys.stderr if to_stderr else sys.stdout)
    if args.json:
        write_json({"machine": facts, "rows": rows}, args.json)
    return 0


@contextlib.contextmanager
def _contest(model: Any, draft: str | None) -> Iterator[runs.Contest]:
    with contextlib.ExitStack() as stack:
        try:
            contest = stack.enter_context(runs.Contest(model, draft))
        except (TypeError, ValueError) as error:
            raise CliError(f"--draft {draft}: {error}") from error
        yield contest


def _measure(
    contest: runs.Contest,
    tokenizer: Any,
    dtype: str,
    args: argparse.Namespace,
    deadline: float,
    progress: Progress,
) -> list[Cell]:
    """Runs every prompt by every method once, then again in turn while time is left."""
    chosen = [p for p in PROMPTS if not args.prompt or p.name in args.prompt]
    encoded = [_encode(tokenizer, prompt.text) for prompt in chosen]
    progress.say(f"{dtype}: warming up")
    cost = demo_size.measure(contest, encoded[0])
    lengths = [ids.shape[1] for ids in encoded]
    left = deadline - time.monotonic()
    tokens = demo_size.choose_tokens(chosen, lengths, cost, left, len(contest.patched))
    if args.max_new_tokens:
        tokens = [args.max_new_tokens] * len(chosen)
    cells = [
        Cell(prompt.name, dtype, ids, _fit(contest.plain, ids, n))
        for prompt, ids, n in zip(chosen, encoded, tokens, strict=True)
    ]
    for repeat in range(args.repeats or MAX_REPEATS):
        for cell in cells:
            late = repeat > 0 and time.monotonic() + cell.seconds() > deadline
            if late and args.repeats is None:
                continue
            for method in contest.methods:
                progress.say(f"{dtype} {cell.prompt}: {method}, run {repeat + 1}")
                done = contest.run(cell.input_ids, cell.new_tokens, method)
                cell.runs.setdefault(method, []).append(done)
                key = tuple(done.tokens)
                if dtype != "fp32" and key not in cell.gaps:
                    gap = runs.largest_logit_gap(contest.plain, cell.input_ids, done.tokens)
                    cell.gaps[key] = gap
    return cells


def _encode(tokenizer: Any, text: str) -> torch.Tensor:
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
    return tokenizer(text, return_tensors="pt")["input_ids"]


def _fit(model: Any, input_ids: torch.Tensor, tokens: int) -> int:
    allowed = models.context_length(model)
    room = tokens if allowed is None else allowed - input_ids.shape[1]
    if room < 1:
        raise CliError(
            f"the demo's prompt has {input_ids.shape[1]} tokens and the model allows {allowed}: "
            "give --model one with a longer context"
        )
    return min(tokens, room)


def _rows(cell: Cell) -> list[dict[str, Any]]:
    """The JSON rows of one cell. Speeds are those of the median run."""
    rows = []
    plain = cell.runs["plain"][0]
    plain_speed = len(plain.tokens) / statistics.median(r.seconds for r in cell.runs["plain"])
    for method, done in cell.runs.items():
        seconds = statistics.median(r.seconds for r in done)
        speed = len(done[0].tokens) / seconds
        counts = done[0].metrics or {}
        rows.append(
            {
                "prompt": cell.prompt,
                "method": method,
                "new_tokens": len(done[0].tokens),
                "seconds": seconds,
                "tokens_per_second": speed,
                "dtype": cell.dtype,
                "speedup_vs_plain": speed / plain_speed,
                "acceptance_rate": counts.get("acceptance_rate"),
                "mean_acceptance_length": counts.get("mean_acceptance_length"),
                "accepted_per_position": counts.get("accepted_per_position"),
                "same_tokens": all(r.tokens == plain.tokens for r in done),
                "largest_logit_gap": max(
                    (cell.gaps[tuple(r.tokens)] for r in done if tuple(r.tokens) in cell.gaps),
                    default=None,
                ),
                "first_token_seconds": statistics.median(r.first_token_seconds for r in done),
                "prompt_tokens": cell.input_ids.shape[1],
                "all_seconds": [r.seconds for r in done],
            }
        )
    return rows


def _table(rows: list[dict[str, Any]]) -> str:
    header = ("dtype, prompt", "method", "tokens", "seconds", "first token", "tokens/s", "speed-up",
              "accepted", "tokens/forward", "accepted per position", "same tokens",
              "largest gap")  # fmt: skip

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    def line(row: dict[str, Any]) -> tuple[str, ...]:
        counts = row["accepted_per_position"]
        shown = counts and " ".join(map(str, counts[:6])) + (" ..." if len(counts) > 6 else "")
        return (
            f"{row['dtype']} {row['prompt']}",
            row["method"],
            str(row["new_tokens"]),
            f"{row['seconds']:.2f}",
            f"{row['first_token_seconds']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup_vs_plain']:.2f}x",
            number(row["acceptance_rate"], ".0%"),
            number(row["mean_acceptance_length"], ".2f"),
            shown or "",
            "yes" if row["same_tokens"] else "no",
            number(row["largest_logit_gap"], ".3f"),
        )

    return format_table(header, [line(row) for row in rows])


def _verdict(rows: list[dict[str, Any]]) -> str:
    """The rule by which sameness is judged, and what came of it."""
    text = "fp32 must give plain's tokens; "
    wrong = [r["prompt"] for r in rows if r["dtype"] == "fp32" and not r["same_tokens"]]
    if wrong:
        text = f"DIFFERENT TOKENS in fp32: {', '.join(wrong)}; "
    return text + (
        "in 16 bits near-ties may fall either way: 'largest gap' is how far an emitted token lay "
        "below the largest logit (0: never), plain's own gap beside it."
    )
