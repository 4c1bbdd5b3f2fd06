"""The adaptive draft size against a simulated model, where costs and chances are known, so that the
best fixed size can be computed. Seeds are fixed: nothing depends on the machine.
"""

import random
import statistics

import pytest

from specdec_kernels import planner
from specdec_kernels.decoding.controller import AcceptanceModel, Controller, CostModel

LARGEST = 48
CLASS = 2  # of confidence, all the time: the drafter does not know how good it is


def steps(rate_at, slot_cost, count, seed=0, batch=1):
    """(cost, expected tokens) of each step in units of a plain one. The controller sees costs that
    are disturbed upwards, and tokens as chance has it.

    rate_at: step to the chance that a drafted token is right.
    """
    chance = random.Random(seed)
    adaptive = Controller(CostModel(), AcceptanceModel(), fixed=None, largest=LARGEST)
    done = []
    for step in range(count):
        rate, size = rate_at(step), adaptive.draft_size(batch, [CLASS] * batch)
        accepted = [0] * batch
        for row in range(batch):
            while accepted[row] < size and chance.random() < rate:
                accepted[row] += 1
        cost = 1.0 + slot_cost * size
        measured = cost * (1.0 + 0.15 * abs(chance.gauss(0, 1)))
        adaptive.costs.record(batch, size + 1, measured)
        adaptive.record([CLASS] * batch, [size] * batch, accepted)
        done.append((cost, planner.expected_tokens(rate, size)))
    return done


def speed(done):
    return sum(tokens for _, tokens in done) / sum(cost for cost, _ in done)


def best(rate, slot_cost):
    """Tokens per unit of cost with the best fixed size."""
    size = planner.best_k(rate, slot_cost, LARGEST)
    return planner.speedup(rate, size, slot_cost)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("slot_cost", [0.005, 0.02, 0.05, 0.15, 0.3])
def test_never_slower_with_drafts_that_are_always_wrong(slot_cost, batch):
    runs = [steps(lambda _: 0.0, slot_cost, 300, seed, batch) for seed in range(5)]
    assert statistics.median(map(speed, runs)) >= 0.97
    assert min(map(speed, runs)) >= 0.96


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97])
@pytest.mark.parametrize("slot_cost", [0.005, 0.02, 0.05, 0.15, 0.3])
def test_near_the_best_fixed_size(slot_cost, rate, batch):
    runs = [steps(lambda _: rate, slot_cost, 300, seed, batch) for seed in range(7)]
    assert statistics.mean(map(speed, runs)) >= 0.93 * best(rate, slot_cost)


@pytest.mark.parametrize("slot_cost", [0.02, 0.05, 0.15])
@pytest.mark.parametrize(("before", "after"), [(0.1, 0.9), (0.0, 0.95), (0.9, 0.1), (0.95, 0.0)])
def test_recovers_within_30_steps_when_acceptance_jumps(before, after, slot_cost):
    runs = [
        steps(lambda step: before if step < 200 else after, slot_cost, 250, seed)
        for seed in range(15)
    ]
    afterwards = [step for run in runs for step in run[230:250]]
    assert speed(afterwards) >= 0.9 * best(after, slot_cost)


def test_a_plain_step_is_measured_first_and_again_where_drafts_gain_little():
    """Without it, what a plain step costs would be a guess, and drafts that lose would go on."""
    adaptive = Controller(CostModel(), AcceptanceModel(), fixed=None, largest=LARGEST)
    assert adaptive.draft_size(1, [4]) == 0
    adaptive.costs.record(1, 1, 1.0)
    adaptive.costs.record(1, 2, 1.6)
    sizes = []
    for _ in range(300):
        sizes.append(adaptive.draft_size(1, [4]))
        adaptive.record([4], [sizes[-1]], [min(sizes[-1], 1)])
        adaptive.costs.record(1, sizes[-1] + 1, 1.0 + 0.6 * sizes[-1])
    assert 3 <= sizes.count(0) <= 6 and max(sizes[50:]) <= 2


def test_other_batches_are_measured_on_their_own():
    adaptive = Controller(CostModel(), AcceptanceModel(), fixed=None, largest=LARGEST)
    adaptive.costs.record(1, 1, 1.0)
    assert adaptive.draft_size(1, [4]) > 0
    assert adaptive.draft_size(2, [4, 4]) == 0
