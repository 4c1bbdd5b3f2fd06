"""How much to draft: the size with the best expected tokens per second, zero included.

A chain of k drafted tokens that are each right with probability a yields (1 - a^(k+1)) / (1 - a)
tokens on average (Leviathan et al., 2023, equation 1); divided by the measured cost of a verify
forward over k + 1 slots, the best k follows. Both are learnt while decoding: the cost by window
size, the probability by how sure the drafter is.
"""

from __future__ import annotations

import math
import statistics
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specdec_kernels.drafting import CLASS_CHANCES, CLASSES
from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.planner import expected_tokens

SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
PRIOR_WEIGHT = 4.0
MEMORY, SHORT_MEMORY = 0.97, 0.5
SURPRISE = 2.5  # nats
PRIOR_SLOT_COST = 0.03
MARGIN = 1.02
FIRST_PAUSE, SHORTEST_PAUSE, LONGEST_PAUSE = 2, 4, 20  # steps between probes
PROBE_SHARE = 0.01  # of the time, to be lost by probing
STALE, CLEAR = 64, 1.3  # steps after which a plain one is measured again where drafts gain less
SAMPLES = 7  # of a window size, the newest
MOST_KEPT = 1024  # window sizes and batches, those seen last


class CostModel:
    """Seconds of a verify forward by (batch, window size): the median of recent measurements."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: dict[tuple[int, int], deque[float]] = {}

    def record(self, batch: int, window: int, seconds: float) -> None:
        key = batch, _bucket(window)
        with self._lock:
            known = self._samples.pop(key, None) or deque(maxlen=SAMPLES)
            known.append(seconds)
            self._samples[key] = known
            if len(self._samples) > MOST_KEPT:
                del self._samples[next(iter(self._samples))]

    def state(self) -> list[list[Any]]:
        """[batch, window, [seconds, ...]] of everything that was measured, for `restore`."""
        with self._lock:
            return [[*key, list(samples)] for key, samples in self._samples.items()]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """Raises TypeError or ValueError for anything that `state` did not make."""
        samples = {
            (int(batch), int(window)): deque(map(_positive, seconds), maxlen=SAMPLES)
            for batch, window, seconds in state[-MOST_KEPT:]
            if seconds
        }
        with self._lock:
            self._samples = samples

    def curve(self, batch: int, windows: Sequence[int]) -> list[float]:
        """Relative cost of each window size; unmeasured ones are interpolated or extrapolated."""
        with self._lock:
            points = sorted(
                (window, statistics.median(samples))
                for (b, window), samples in self._samples.items()
                if b == batch
            )
        if not points:
            return [1.0 + PRIOR_SLOT_COST * (w - 1) for w in windows]
        points = _never_falling(points)
        return [_interpolate(points, window) for window in windows]

    def knows_plain(self, batch: int) -> bool:
        """Whether a window of the root alone was measured."""
        with self._lock:
            return (batch, 1) in self._samples

    def largest(self, batch: int) -> int:
        """The largest window measured so far."""
        with self._lock:
            return max((w for b, w in self._samples if b == batch), default=1)


class AcceptanceModel:
    """Probability that the next drafted token is right, by the drafter's confidence class.

    Two counts per class: one that remembers long, and the last few. When the last ones can hardly
    be of the same chance, the text has changed, and what came before is forgotten.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[int, Counts] = {}

    def record(self, confidence: int, drafted: int, accepted: int) -> None:
        if drafted == 0:
            return
        with self._lock:
            counts = self._counts.get(confidence) or Counts.prior(confidence)
            self._counts[confidence] = counts.after(accepted, accepted + (accepted < drafted))

    def state(self) -> list[list[float]]:
        """[class, *counts] of every class, for `restore`."""
        with self._lock:
            return [[confidence, *counts] for confidence, counts in self._counts.items()]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Raises TypeError or ValueError for anything that `state` did not make."""
        counts = {int(c): Counts(*map(float, numbers)) for c, *numbers in state}
        for c in counts.values():
            if not (0.0 <= c.right <= c.tried < math.inf and 0.0 <= c.lately <= c.tries < math.inf):
                raise ValueError(f"expected no more right ones than were tried, got {c}")
        with self._lock:
            self._counts = counts

    def probability(self, confidence: int) -> float:
        with self._lock:
            counts = self._counts.get(confidence) or Counts.prior(confidence)
        return min(counts.chance(), 0.995)


class Counts(NamedTuple):
    """Decaying counts of drafted tokens: right ones and all, over long and lately."""

    right: float
    tried: float
    lately: float = 0.0
    tries: float = 0.0

    @staticmethod
    def prior(confidence: int) -> Counts:
        chance = CLASS_CHANCES[(confidence - 1) % CLASSES]
        return Counts(PRIOR_WEIGHT * chance, PRIOR_WEIGHT)

    def after(self, right: int, tried: int) -> Counts:
        counts = Counts(
            MEMORY * self.right + right,
            MEMORY * self.tried + tried,
            SHORT_MEMORY * self.lately + right,
            SHORT_MEMORY * self.tries + tried,
        )
        if counts.tries * _divergence(counts.lately / counts.tries, counts.chance()) < SURPRISE:
            return counts
        return counts._replace(right=counts.lately, tried=counts.tries)

    def chance(self) -> float:
        return self.right / self.tried


class Controller:
    """Decides each step's draft size for one run; the models outlive the run.

    fixed: draft this many tokens whenever the drafter has any, without adapting.
    table: (first, last, tokens): instead, so many while first to last rows are running.
    largest, smallest: bounds of the adaptive size, if it is not zero.
    draft_cost: what drafting costs, where that is not next to nothing.
    expected: tokens per step of a row with this many drafted tokens, where the drafter knows better
        than what a chain brings.
    """

    def __init__(
        self,
        costs: CostModel,
        acceptance: AcceptanceModel,
        *,
        fixed: int | None,
        largest: int,
        table: Sequence[tuple[int, int, int]] = (),
        smallest: int = 1,
        draft_cost: DraftCost | None = None,
        expected: Callable[[int], float] | None = None,
    ):
        self.costs = costs
        self.acceptance = acceptance
        self.fixed = fixed
        self.table = table
        self.largest = largest
        self.smallest = smallest
        self.draft_cost = draft_cost
        self.expected = expected
        self._pause: dict[int, int] = {}
        self._pause_left: dict[int, int] = {}
        self._dear_pause, self._longest_pause = 0, LONGEST_PAUSE
        self._since_plain = 0

    def draft_size(self, batch: int, confidence: Sequence[int], running: int | None = None) -> int:
        """Drafted tokens per row for this step, given each active row's confidence class.

        running: rows that are not finished; None is all of the batch.
        """
        if not any(confidence):
            return 0
        rows = batch if running is None else running
        fixed = next((k for first, last, k in self.table if first <= rows <= last), self.fixed)
        if fixed is not None:
            return fixed
        size = self._best_size(batch, confidence) if self.costs.knows_plain(batch) else 0
        self._since_plain = self._since_plain + 1 if size else 0
        return size

    def _best_size(self, batch: int, confidence: Sequence[int]) -> int:
        reach = max(4 * self.costs.largest(batch), self.smallest + 1)
        most = min(self.largest, reach - 1)
        sizes = [0, *(s for s in sorted({*SIZES, self.smallest}) if self.smallest <= s <= most)]
        costs = self.costs.curve(batch, [s + 1 for s in sizes])
        if self.draft_cost is not None:
            drafting = [self.draft_cost.of(size, batch, costs[0]) for size in sizes]
            costs = [cost + more for cost, more in zip(costs, drafting, strict=True)]
        tokens = self._tokens(confidence, sizes)
        gains = [n / cost for n, cost in zip(tokens, costs, strict=True)]
        best = max(range(len(sizes)), key=gains.__getitem__)
        if gains[best] > MARGIN * gains[0]:
            unsure = gains[best] < CLEAR * gains[0] and self._since_plain >= STALE
            return 0 if unsure else sizes[best]
        if len(sizes) == 1:
            return 0
        lost = max(costs[1] / costs[0] - tokens[1] / tokens[0], 0.0)
        pause = int(min(lost / PROBE_SHARE, sys.maxsize))
        self._longest_pause = min(max(pause, SHORTEST_PAUSE), LONGEST_PAUSE)
        if self.draft_cost is not None:
            self._dear_pause = pause
        return self._probe(max(confidence))

    def record(
        self, confidence: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        for c, tried, kept in zip(confidence, drafted, accepted, strict=True):
            self.acceptance.record(c, tried, kept)
            if tried:
                pause = 2 * self._pause.get(c, FIRST_PAUSE // 2) if kept == 0 else FIRST_PAUSE
                self._pause[c] = min(pause, self._longest_pause)
                self._pause_left[c] = max(self._pause[c], self._dear_pause)

    def _tokens(self, confidence: Sequence[int], sizes: Sequence[int]) -> list[float]:
        """What a step is expected to emit in all rows, by draft size."""
        if self.expected is not None:
            by_size = [self.expected(size) for size in sizes]
            drafting = sum(map(bool, confidence))
            return [drafting * n + len(confidence) - drafting for n in by_size]
        chances = [self.acceptance.probability(c) if c else 0.0 for c in confidence]
        return [sum(expected_tokens(a, size) for a in chances) for size in sizes]

    def _probe(self, confidence: int) -> int:
        """A short draft now and then, so that a text that turns predictable is noticed.

        Where drafting is dear, so seldom that what probes lose is PROBE_SHARE of the time.
        """
        left = self._pause_left.get(confidence, self._dear_pause)
        self._pause_left[confidence] = left - 1
        return 0 if left > 0 else self.smallest


def _divergence(found: float, expected: float) -> float:
    """How unlikely it is, per try, to find a share where another is expected (Kullback-Leibler)."""
    expected = min(max(expected, 0.01), 0.99)
    return sum(
        share * math.log(share / chance)
        for share, chance in ((found, expected), (1.0 - found, 1.0 - expected))
        if share > 0.0
    )


def _positive(seconds: Any) -> float:
    if not 0.0 < float(seconds) < math.inf:
        raise ValueError(f"expected seconds above 0, got {seconds!r}")
    return float(seconds)


def _bucket(window: int) -> int:
    """Window sizes up to 8 are kept apart, larger ones in steps of an eighth."""
    if window <= 8:
        return window
    step = 1 << (window.bit_length() - 3)
    return (window + step - 1) // step * step


def _never_falling(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Lowers each point to the cheapest larger window.

    What disturbs a measurement makes it longer, so the smaller window was the one disturbed.
    """
    cheapest, lowered = float("inf"), []
    for window, seconds in reversed(points):
        cheapest = min(cheapest, seconds)
        lowered.append((window, cheapest))
    return lowered[::-1]


def _interpolate(points: Sequence[tuple[int, float]], window: int) -> float:
    """Linear between measured points; outside them by the prior slope."""
    first_window, first = points[0]
    if window <= first_window:
        return first / (1.0 + PRIOR_SLOT_COST * (first_window - window))
    previous_window, previous = first_window, first
    for point_window, value in points[1:]:
        if window <= point_window:
            share = (window - previous_window) / (point_window - previous_window)
            return previous + share * (value - previous)
        previous_window, previous = point_window, value
    slope = max(
        (previous - first) / max(previous_window - first_window, 1), PRIOR_SLOT_COST * first
    )
    return previous + slope * (window - previous_window)
