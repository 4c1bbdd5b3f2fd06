"""What drafting with a model costs."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any


class DraftCost:
    """Seconds per drafted token, by batch: the median of recent measurements.

    prior: the share of a target forward that one is taken to cost until it is measured.
    most: further tokens of a step cost nothing; None without such a limit.
    """

    def __init__(self, prior: float, most: int | None = None):
        self.prior = prior
        self.most = most
        self._lock = threading.Lock()
        self._samples: dict[int, deque[float]] = {}

    def record(self, batch: int, drafted: int, seconds: float) -> None:
        with self._lock:
            self._samples.setdefault(batch, deque(maxlen=7)).append(seconds / self._paid(drafted))

    def state(self) -> list[list[Any]]:
        """[batch, [seconds, ...]], for `restore`."""
        with self._lock:
            return [[batch, list(samples)] for batch, samples in self._samples.items()]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """Raises TypeError or ValueError for anything that `state` did not make."""
        samples = {int(b): deque(map(float, seconds), maxlen=7) for b, seconds in state}
        if not all(0.0 <= s < float("inf") for known in samples.values() for s in known):
            raise ValueError(f"expected seconds of at least 0, got {state}")
        with self._lock:
            self._samples = {batch: known for batch, known in samples.items() if known}

    def per_token(self, batch: int, forward: float) -> float:
        """In the unit of `forward`, the cost of a target forward over one slot."""
        with self._lock:
            known = self._samples.get(batch)
            return statistics.median(known) if known else self.prior * forward

    def of(self, drafted: int, batch: int, forward: float) -> float:
        """Of a step with `drafted` tokens per row, in the unit of `forward`."""
        return self._paid(drafted) * self.per_token(batch, forward)

    def _paid(self, drafted: int) -> int:
        return drafted if self.most is None else min(drafted, self.most)
