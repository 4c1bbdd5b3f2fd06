"""What speculation did: counts, acceptance by position, and where the time went."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

PHASES = ("prefill", "draft", "verify", "sample", "commit")


@dataclass
class Metrics:
    """Totals since the last `reset()`. Safe to update from several threads.

    num_drafts: verification steps of a row that had at least one drafted token.
    num_draft_tokens, num_accepted_tokens: along the tree's longest path and along the accepted one.
    accepted_per_position: at index i, how often the drafted token i + 1 behind the root was kept.
    num_steps: target forwards after prefill. num_row_steps: the same, counted once per active row.
    num_new_tokens: emitted tokens, the one from prefill included.
    seconds: time in each of PHASES.
    drafters: by method, where several are combined, how many tokens each drafted along its longest
        paths, and how many of its tokens were kept; one that several drafted counts for each.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    num_steps: int = 0
    num_row_steps: int = 0
    num_new_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    drafters: dict[str, dict[str, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafted tokens over drafted tokens; 0 when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per target forward of a row, bonus token included; 1 without drafts."""
        if not self.num_row_steps:
            return 1.0
        return 1.0 + self.num_accepted_tokens / self.num_row_steps

    def add(self, other: Metrics) -> None:
        """Adds the counts of a finished run."""
        with self._lock:
            for name in (
                "num_drafts",
                "num_draft_tokens",
                "num_accepted_tokens",
                "num_steps",
                "num_row_steps",
                "num_new_tokens",
            ):
                setattr(self, name, getattr(self, name) + getattr(other, name))
            missing = len(other.accepted_per_position) - len(self.accepted_per_position)
            self.accepted_per_position.extend([0] * missing)
            for i, count in enumerate(other.accepted_per_position):
                self.accepted_per_position[i] += count
            for phase, value in other.seconds.items():
                self.seconds[phase] += value
            for name, counts in other.drafters.items():
                self.record_drafter(name, *counts.values())

    def record_row(self, num_draft_tokens: int, num_accepted: int) -> None:
        """One row's verification: the depth that was drafted and how much of it was kept."""
        self.num_row_steps += 1
        if num_draft_tokens == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        missing = num_accepted - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for i in range(num_accepted):
            self.accepted_per_position[i] += 1

    def record_drafter(self, name: str, num_draft_tokens: int, num_accepted: int) -> None:
        """What one of several combined drafters had its part in."""
        counts = self.drafters.setdefault(name, {"num_draft_tokens": 0, "num_accepted_tokens": 0})
        counts["num_draft_tokens"] += num_draft_tokens
        counts["num_accepted_tokens"] += num_accepted

    def reset(self) -> None:
        with self._lock:
            fresh = Metrics()
            for name in self.__dataclass_fields__:
                if name != "_lock":
                    setattr(self, name, getattr(fresh, name))

    def counts(self) -> dict[str, Any]:
        """What is counted by row, and the rates."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "accepted_per_position": list(self.accepted_per_position),
            "num_row_steps": self.num_row_steps,
            "num_new_tokens": self.num_new_tokens,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
        }

    def snapshot(self) -> dict[str, Any]:
        """A plain dictionary for JSON."""
        with self._lock:
            return {
                **self.counts(),
                "num_steps": self.num_steps,
                "seconds": dict(self.seconds),
                "drafters": {name: dict(counts) for name, counts in self.drafters.items()},
            }

    def prometheus(self, model_name: str = "") -> str:
        """The counts as Prometheus scrapes them, named as vLLM names them (spec_decode_...).

        Raises ImportError without prometheus-client. `specdec_kernels.prometheus.Collector` serves
        them beside other metrics of a process.
        """
        from specdec_kernels.prometheus import exposition  # prometheus-client is optional

        return exposition(self, model_name)
