"""What was learnt about a model on a machine, kept for the next process.

One JSON file holds entries of several models, devices and dtypes: {"specdec_profile": 1, "entries":
[{"key": {...}, "costs": ..., "acceptance": ..., "draft_cost": ...}]}.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec_kernels.decoding.controller import AcceptanceModel, CostModel
from specdec_kernels.drafting.cost import DraftCost

MAGIC, VERSION = "specdec_profile", 1
Key = Mapping[str, Any]


class Learnt:
    """The parts of a controller that outlive a run. draft_cost: None for drafters that are free."""

    def __init__(
        self, costs: CostModel, acceptance: AcceptanceModel, draft_cost: DraftCost | None
    ) -> None:
        self.costs, self.acceptance, self.draft_cost = costs, acceptance, draft_cost

    def state(self) -> dict[str, Any]:
        return {
            "costs": self.costs.state(),
            "acceptance": self.acceptance.state(),
            "draft_cost": None if self.draft_cost is None else self.draft_cost.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.costs.restore(state["costs"])
        self.acceptance.restore(state["acceptance"])
        if self.draft_cost is not None and state["draft_cost"] is not None:
            self.draft_cost.restore(state["draft_cost"])


def load(path: str | os.PathLike[str], key: Key, learnt: Learnt) -> bool:
    """Whether the file had an entry of this key, which `learnt` then begins with.

    A file that does not exist has none. Raises ValueError for a damaged one; `learnt` is then as it
    was.
    """
    for entry in _entries(Path(path)):
        if entry["key"] == dict(key):
            before = learnt.state()
            try:
                learnt.restore(entry)
            except (KeyError, TypeError, ValueError) as error:
                learnt.restore(before)
                raise ValueError(f"profile: {path} is damaged: {error!r}") from error
            return True
    return False


def save(path: str | os.PathLike[str], key: Key, learnt: Learnt) -> None:
    """Adds an entry, or puts it in place of that of the same key; the others stay."""
    path = Path(path)
    others = [entry for entry in _entries(path) if entry["key"] != dict(key)]
    content = {MAGIC: VERSION, "entries": [*others, {"key": dict(key), **learnt.state()}]}
    handle, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"profile: {path} is no profile: {error}") from error
    if not isinstance(content, dict) or content.get(MAGIC) != VERSION:
        raise ValueError(f"profile: {path} is no profile of this version ({MAGIC} {VERSION})")
    entries = content.get("entries")
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("key"), dict) for entry in entries
    ):
        raise ValueError(f"profile: {path} is damaged: expected a list of entries")
    return entries
