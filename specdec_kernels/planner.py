"""The arithmetic of pay-off: what a draft brings, what it costs, and where it stops to pay.

With a the chance that a drafted token is right, k drafted tokens a step, c the cost of drafting one
of them and s what one more slot costs the target's forward, both in units of a plain decoding step:

    tokens a step   (1 - a^(k+1)) / (1 - a)        Leviathan et al., 2023, equation 1
    cost of a step  1 + k (c + s)                  theorem 3.8 there, for s = 0
    speedup         tokens / cost
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

LONGEST = 128
WORTH = 1.02  # gains below this are noise


class Plan(NamedTuple):
    """break_even_acceptance_rate: where the speedup is 1 at this k; None when no rate reaches it.
    break_even_draft_cost: the draft_cost at which it is 1, None for k = 0."""

    acceptance_rate: float
    num_speculative_tokens: int
    draft_cost: float
    slot_cost: float
    expected_tokens: float
    iteration_cost: float
    speedup: float
    best_k: int
    best_speedup: float
    break_even_acceptance_rate: float | None
    break_even_draft_cost: float | None


def plan(
    acceptance_rate: float,
    num_speculative_tokens: int,
    draft_cost: float,
    slot_cost: float = 0.0,
    longest: int = LONGEST,
) -> Plan:
    """Everything about one setting.

    Args:
        acceptance_rate: chance that a drafted token is right when those before it are, 0 to 1.
        num_speculative_tokens: drafted tokens a step, at least 0.
        draft_cost: of one drafted token, as a share of a plain decoding step, at least 0.
        slot_cost: what each drafted token adds to the target's forward, in the same unit.
        longest: largest k that best_k may be.

    Raises:
        ValueError: naming the number, what was expected and what came.
    """
    if not 0.0 <= acceptance_rate <= 1.0:
        raise ValueError(f"plan: expected acceptance_rate from 0 to 1, got {acceptance_rate}")
    if num_speculative_tokens < 0:
        raise ValueError(
            f"plan: expected num_speculative_tokens of at least 0, got {num_speculative_tokens}"
        )
    for name, cost in (("draft_cost", draft_cost), ("slot_cost", slot_cost)):
        if not 0.0 <= cost < float("inf"):
            raise ValueError(f"plan: expected {name} of at least 0 and finite, got {cost}")
    a, k, c = acceptance_rate, num_speculative_tokens, draft_cost + slot_cost
    best = best_k(a, c, longest)
    return Plan(
        a,
        k,
        draft_cost,
        slot_cost,
        expected_tokens(a, k),
        1.0 + k * c,
        speedup(a, k, c),
        best,
        speedup(a, best, c),
        break_even_acceptance_rate(k, c),
        None if k == 0 else max((expected_tokens(a, k) - 1.0) / k - slot_cost, 0.0),
    )


def expected_tokens(acceptance_rate: float, k: int) -> float:
    """Tokens that a step emits on average, the bonus token counted."""
    if acceptance_rate == 1.0:
        return k + 1.0
    return (1.0 - acceptance_rate ** (k + 1)) / (1.0 - acceptance_rate)


def tokens_of_mean(acceptance_rate: float, k: float) -> float:
    """The same for steps of the two lengths between which their mean k lies."""
    whole, part = int(k), k - int(k)
    fewer, more = (expected_tokens(acceptance_rate, n) for n in (whole, whole + 1))
    return (1.0 - part) * fewer + part * more


def speedup(acceptance_rate: float, k: int, cost: float) -> float:
    """Over decoding without drafts; cost: of one drafted token, slot and draft together."""
    return expected_tokens(acceptance_rate, k) / (1.0 + k * cost)


def best_k(acceptance_rate: float, cost: float, longest: int = LONGEST) -> int:
    """The k with the largest speedup, the smallest of equals."""
    return max(range(longest + 1), key=lambda k: speedup(acceptance_rate, k, cost))


def break_even_acceptance_rate(k: int, cost: float) -> float | None:
    """The rate at which k drafted tokens bring what they cost."""
    if k == 0 or cost > 1.0:
        return None
    return _solve(lambda a: expected_tokens(a, k) - (1.0 + k * cost))


def acceptance_rate_of(tokens_per_step: float, k: float) -> float:
    """The rate at which steps of k drafted tokens emit so many on average; k may be a mean."""
    return _solve(lambda a: tokens_of_mean(a, k) - tokens_per_step)


def _solve(rising: Callable[[float], float]) -> float:
    """Where a rising function of [0, 1] crosses 0; the end that is nearer when it does not."""
    low, high = 0.0, 1.0
    if rising(low) >= 0.0:
        return low
    if rising(high) <= 0.0:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0.0 else (middle, high)
    return (low + high) / 2


def advice(found: Plan) -> str:
    """One sentence that begins with what to do: keep, shorten, lengthen, better draft, or off."""
    k, best = found.num_speculative_tokens, found.best_k
    gain = found.best_speedup / found.speedup
    other = f"to {best} for {found.best_speedup:.2f}x, with {k} it is {found.speedup:.2f}x"
    if found.best_speedup < WORTH:
        return (
            f"off: no draft length pays at an acceptance rate of {found.acceptance_rate:.2f} and "
            f"a cost of {found.draft_cost + found.slot_cost:.2f} of a step for each drafted token"
        )
    if gain >= WORTH and best < k:
        return (
            f"shorten: to {best} for {found.best_speedup:.2f}x, with {k} it is {found.speedup:.2f}x"
        )
    if found.best_speedup < 1.2:
        return (
            f"better draft: this one brings {found.best_speedup:.2f}x at most; a higher acceptance "
            f"rate than {found.acceptance_rate:.2f}, or a cheaper draft, is what would help"
        )
    if gain >= WORTH and best > k:
        return f"lengthen: {other}"
    return f"keep: {k} drafted tokens bring {found.speedup:.2f}x, hardly less than the best length"
