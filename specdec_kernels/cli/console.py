"""Plain terminal output: errors, colour, a table, progress lines. No dependency."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

GREEN = "\x1b[32m"
RESET = "\x1b[0m"


class CliError(Exception):
    """A mistake of the caller, told in one sentence that holds the remedy. Exit code 2."""


def use_colour(choice: str, stream: TextIO) -> bool:
    """`choice` is auto, always or never; auto colours terminals unless NO_COLOR is set."""
    if choice != "auto":
        return choice == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR")


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first two to the left, the rest to the right."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))]  # noqa: B905
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if i < 2 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(cells[0]), line(rule), *[line(row) for row in cells[1:]]])


def write_json(value: Any, target: str) -> None:
    """Writes `value` to the file `target`, or to stdout when it is "-"."""
    text = json.dumps(value, indent=2)
    if target == "-":
        print(text)
        return
    try:
        with open(target, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise CliError(
            f"cannot write {target}: {error.strerror}; give --json a file in an existing folder"
        ) from error


def check_json_target(target: str | None) -> None:
    """Fails before long work rather than after it."""
    folder = os.path.dirname(os.path.abspath(target)) if target and target != "-" else None
    if folder is not None and not os.access(folder, os.W_OK):
        raise CliError(f"cannot write {target}: give --json a file in an existing, writable folder")


class Progress:
    """Says what is being done, on stderr: one rewritten line on a terminal, else a line each."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.rewrites = self.stream.isatty()
        self.start = time.monotonic()

    def say(self, text: str) -> None:
        elapsed = f"[{time.monotonic() - self.start:4.0f} s] "
        end = "" if self.rewrites else "\n"
        prefix = "\r\x1b[K" if self.rewrites else ""
        print(prefix + elapsed + text, end=end, file=self.stream, flush=True)

    def clear(self) -> None:
        if self.rewrites:
            print("\r\x1b[K", end="", file=self.stream, flush=True)

    @contextlib.contextmanager
    def ticking(self, text: str) -> Iterator[None]:
        """Keeps the clock of the line moving while one long call runs."""
        self.say(text)
        done = threading.Event()

        def tick() -> None:
            while not done.wait(1.0):
                self.say(text)

        thread = threading.Thread(target=tick, daemon=True) if self.rewrites else None
        if thread is not None:
            thread.start()
        try:
            yield
        finally:
            done.set()
            if thread is not None:
                thread.join()
            self.clear()
