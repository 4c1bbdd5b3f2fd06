"""What `specdec bench` asks for: three kinds of work with twenty prompts each, or one's own."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from specdec_kernels.cli.console import CliError

OURS = Path(__file__).with_name("prompts.jsonl")


def read_prompts(path: Path) -> dict[str, tuple[str, ...]]:
    """By workload, from JSON lines {"prompt": TEXT, "workload": NAME}; without NAME it is "own"."""
    found: dict[str, list[str]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(
            f"cannot read {path}: {error}; give --prompts a file of JSON lines"
        ) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            text, name = entry["prompt"], entry.get("workload", "own")
            right = isinstance(text, str) and text.strip() and isinstance(name, str)
        except (ValueError, KeyError, TypeError, AttributeError):
            right = False
        if not right:
            raise CliError(
                f'{path}, line {number}: expected {{"prompt": TEXT, "workload": NAME}}, got '
                f"{line.strip()[:60]!r}"
            )
        found.setdefault(name, []).append(text)
    if not found:
        raise CliError(f"{path} holds no prompts: one JSON object a line")
    return {name: tuple(texts) for name, texts in found.items()}


def rows_of(prompts: Sequence[str], count: int) -> list[str]:
    """The first `count` prompts, from the beginning again where there are fewer."""
    return list(itertools.islice(itertools.cycle(prompts), count))
