"""Argument types and the options that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from specdec_kernels import config_checks
from specdec_kernels.cli.console import CliError

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
PLAIN = "plain"
METHODS = (*config_checks.METHODS, PLAIN)
UNDRAFTED = {"none", PLAIN}


def method(text: str) -> str:
    """An argparse type: one of METHODS, or a combination of drafters."""
    for part in config_checks.methods_of(text):
        if part not in METHODS:
            raise argparse.ArgumentTypeError(
                f"expected one of {', '.join(METHODS)}, or several joined by '+' or ',', "
                f"got {text!r}"
            )
    return text


def method_with_options(text: str) -> dict[str, Any]:
    """METHOD[:KEY=VALUE,...] as options of `patch`; values are JSON where they can be."""
    method, _, rest = text.partition(":")
    options: dict[str, Any] = {"method": method}
    for part in rest.split(",") if rest else ():
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"expected KEY=VALUE behind {method}:, got {part!r}")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `low` and at most `high`."""
    span = f"of at least {low}" if high is None else f"from {low} to {high}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"expected a whole number {span}, got {text!r}")
        return value

    return parse


def real(low: float, high: float = float("inf"), *, above: bool = False) -> Callable[[str], float]:
    """An argparse type: a finite number in [low, high], or in (low, high] with `above`."""
    span = f"{'above' if above else 'of at least'} {low:g}"
    span += "" if high == float("inf") else f" and at most {high:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (low < value if above else low <= value) or value > high or value == float("inf"):
            raise argparse.ArgumentTypeError(f"expected a number {span}, got {text!r}")
        return value

    return parse


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="PATH_OR_ID",
        help="folder of a checkpoint or a Hub id (default: the packaged SmolLM2-135M-Instruct)",
    )
    parser.add_argument(
        "--threads",
        type=whole(1, os.cpu_count()),
        metavar="N",
        help="CPU threads (default: torch's own choice)",
    )


def add_json(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help=f"{help} ('-': stdout)"
    )


def add_drafting(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafting")
    group.add_argument(
        "--method",
        type=method,
        default="ngram",
        help="ngram (default); suffix: by frequency; draft_model: see --draft; several joined by "
        "'+' (drafts merged) or ',' (the first that has one); none: our loop without drafts; "
        "plain: transformers alone",
    )
    group.add_argument("--draft", metavar="MODEL", help="the draft model: a folder or a Hub id")
    group.add_argument(
        "--num-speculative-tokens",
        type=whole(1),
        metavar="K",
        help="drafted tokens a step (default: adaptive)",
    )
    group.add_argument("--prompt-lookup-min", type=whole(1), metavar="N", help="shortest match")
    group.add_argument("--prompt-lookup-max", type=whole(1), metavar="N", help="longest match")


def patch_options(args: argparse.Namespace) -> dict[str, object]:
    """Keyword arguments for `specdec_kernels.patch`: only what was given."""
    parts = config_checks.methods_of(args.method)
    if ("draft_model" in parts) == (args.draft is None):
        got = "none" if args.draft is None else f"--method {args.method}"
        raise CliError(f"expected --draft with --method draft_model, got {got}")
    options: dict[str, object] = {"method": args.method}
    if args.draft is not None:
        options["model"] = args.draft
    drafts = UNDRAFTED.isdisjoint(parts)
    for name, used, owner in (
        ("num_speculative_tokens", drafts, "a method that drafts"),
        ("prompt_lookup_min", "ngram" in parts, "--method ngram"),
        ("prompt_lookup_max", "ngram" in parts, "--method ngram"),
    ):
        value = getattr(args, name)
        if value is not None and not used:
            flag = "--" + name.replace("_", "-")
            raise CliError(f"{flag} belongs to {owner}, got --method {args.method}")
        if value is not None:
            options[name] = value
    low, high = args.prompt_lookup_min, args.prompt_lookup_max
    if low is not None and high is not None and low > high:
        raise CliError(
            f"expected --prompt-lookup-min at most --prompt-lookup-max, got {low} and {high}"
        )
    return options


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Runs with `count` CPU threads (None: as they are) and restores the setting."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
