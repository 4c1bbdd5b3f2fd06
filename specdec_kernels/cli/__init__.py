"""The command `specdec`: demo, generate, bench, plan, doctor."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from specdec_kernels import __version__
from specdec_kernels.cli.console import CliError

__all__ = ["main"]

COMMANDS = ("demo", "generate", "bench", "plan", "doctor")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 (doctor found an error), 2 (bad input)."""
    command = "specdec"
    try:
        args = _parser().parse_args(argv)
        command = f"specdec {args.command}"
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return args.run(args)
    except SystemExit as error:
        return int(error.code or 0)
    except CliError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="specdec",
        description="Speculative decoding that makes Hugging Face generate faster, same output.",
    )
    parser.add_argument("--version", action="version", version=f"specdec-kernels {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_Parser
    )
    for name in COMMANDS:
        module = importlib.import_module(f"specdec_kernels.cli.{name}")
        summary = str(module.__doc__).splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    print(f"specdec: warning: {message}", file=sys.stderr)
