"""What drafts bring, learnt from what became of them."""

from __future__ import annotations

import threading
from bisect import bisect

MEMORY = 0.98
PRIOR_WEIGHT = 4.0
PRIOR_FIRST, PRIOR_FALL = 0.5, 1.2
LIKELIEST = 0.98
CHANCE_BOUNDS = (0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.93, 0.97)
CHANCE_WEIGHT = 8.0


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


class Reliability:
    """How often tokens are right to which a drafter gave a chance, beside that chance.

    Learnt for like chances at once; not for several threads.
    """

    def __init__(self) -> None:
        bins = len(CHANCE_BOUNDS) + 1
        self._tried, self._right = [0.0] * bins, [0.0] * bins

    def record(self, chance: float, right: bool) -> None:
        i = bisect(CHANCE_BOUNDS, chance)
        self._tried[i] = MEMORY * self._tried[i] + 1.0
        self._right[i] = MEMORY * self._right[i] + right

    def of(self, chance: float) -> float:
        """What the drafter's chance is worth."""
        i = bisect(CHANCE_BOUNDS, chance)
        return (self._right[i] + CHANCE_WEIGHT * chance) / (self._tried[i] + CHANCE_WEIGHT)
