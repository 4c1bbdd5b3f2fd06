"""Runs every cell of the sweep and writes each run down, so that a killed sweep goes on.

A cell is a workload, greedy or sampled, and a number of rows; in a cell all contestants take turns.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from specdec_kernels.cli.bench.contestants import Contestant
from specdec_kernels.cli.console import CliError

Record = dict[str, Any]
Key = tuple[Any, ...]
CELL = ("workload", "sampling", "concurrency")
KEY = (*CELL, "repeat", "method")


class Cell(NamedTuple):
    workload: str
    sampling: str
    concurrency: int


class Records:
    """The JSON lines of a sweep; the first line says what was measured how."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.records: list[Record] = []
        header = {"settings": dict(settings)}
        if path.exists() and path.stat().st_size:
            known, *self.records = self._read()
            if known != header:
                raise CliError(
                    f"{path} holds runs with other settings ({_difference(known, header)}): give "
                    "--out another folder"
                )
        else:
            self._append(header)
        self._done = {self._key(record) for record in self.records}

    def __contains__(self, key: Key) -> bool:
        return key in self._done

    def add(self, record: Record) -> None:
        self._append(record)
        self.records.append(record)
        self._done.add(self._key(record))

    def _append(self, entry: Mapping[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def _read(self) -> list[Record]:
        """All whole lines; one that a kill cut short is taken off the file."""
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        if not lines[-1].endswith("\n"):
            lines.pop()
            self.path.write_text("".join(lines), encoding="utf-8")
        try:
            return [json.loads(line) for line in lines] or [{}]
        except ValueError as error:
            raise CliError(f"{self.path} does not hold a record a line: {error}") from error

    @staticmethod
    def _key(record: Record) -> Key:
        return tuple(record.get(name) for name in KEY)


def _difference(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    old, new = known.get("settings", {}), wanted["settings"]
    return ", ".join(f"{k}: {old.get(k)!r}, now {new[k]!r}" for k in new if old.get(k) != new[k])


def cells(
    workloads: Sequence[str], samplings: Sequence[str], concurrencies: Sequence[int]
) -> list[Cell]:
    return [Cell(*cell) for cell in itertools.product(workloads, samplings, concurrencies)]


def missing(
    todo: Sequence[Cell], everyone: Sequence[Contestant], repeats: int, records: Records
) -> Iterator[tuple[Cell, int, Contestant]]:
    """What remains to be run, in order: within a cell the contestants take turns."""
    for cell, repeat, contestant in itertools.product(todo, range(repeats), everyone):
        too_many = contestant.most_rows is not None and cell.concurrency > contestant.most_rows
        if not too_many and (*cell, repeat, contestant.name) not in records:
            yield cell, repeat, contestant


def record_of(
    cell: Cell,
    repeat: int,
    contestant: Contestant,
    inputs: Mapping[str, Tensor],
    new_tokens: int,
) -> Record:
    """One run."""
    outcome = contestant.run(inputs, new_tokens, cell.sampling == "sampled")
    emitted = sum(map(len, outcome.tokens))
    counts = outcome.metrics or {}
    return {
        **cell._asdict(),
        "repeat": repeat,
        "method": contestant.name,
        "new_tokens": emitted,
        "seconds": outcome.seconds,
        "time_per_output_token": outcome.seconds / max(map(len, outcome.tokens)),
        "tokens_per_second": emitted / outcome.seconds,
        "acceptance_rate": counts.get("acceptance_rate"),
        "mean_acceptance_length": counts.get("mean_acceptance_length"),
        "metrics": outcome.metrics,
    }
