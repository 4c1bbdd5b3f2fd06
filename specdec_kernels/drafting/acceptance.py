"""What a draft tree of a given size brings, learnt from the slots that verifications kept."""

from __future__ import annotations

import threading

MEMORY = 0.98
PRIOR_WEIGHT = 4.0
PRIOR_FIRST, PRIOR_FALL = 0.5, 1.2
LIKELIEST = 0.98


class SlotAcceptance:
    """How often the token in each slot of a window is accepted.

    Trees stand best first, so the first n slots of a window are the tree that would have been
    drafted in n slots: one verification shows what every smaller tree would have brought.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tried: list[float] = []  # from slot 1 on
        self._kept: list[float] = []

    def record(self, drafted: int, slots: list[int]) -> None:
        """A window of `drafted` slots behind the root, of which `slots` were accepted."""
        with self._lock:
            missing = drafted - len(self._tried)
            self._tried += [0.0] * missing
            self._kept += [0.0] * missing
            for i in range(drafted):
                self._tried[i] = MEMORY * self._tried[i] + 1.0
                self._kept[i] *= MEMORY
            for slot in slots:
                self._kept[slot - 1] += 1.0

    def expected(self, drafted: int) -> float:
        """Tokens that a step emits on average with `drafted` slots behind the root."""
        prior = [PRIOR_FIRST / i**PRIOR_FALL for i in range(1, drafted + 1)]
        with self._lock:
            tried = self._tried + [0.0] * drafted
            kept = self._kept + [0.0] * drafted
        foreseen = sum(n * p for n, p in zip(tried, prior, strict=False))
        level = (sum(kept[:drafted]) + PRIOR_WEIGHT) / (foreseen + PRIOR_WEIGHT)
        rates = (
            (k + PRIOR_WEIGHT * min(level * p, LIKELIEST)) / (n + PRIOR_WEIGHT)
            for k, n, p in zip(kept, tried, prior, strict=False)
        )
        return 1.0 + sum(rates)
