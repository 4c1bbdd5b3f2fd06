"""The controller with a drafter that costs something."""

from itertools import pairwise

import pytest

from specdec_kernels.decoding.controller import AcceptanceModel, Controller, CostModel
from specdec_kernels.drafting.cost import DraftCost


def controller(prior, acceptance=(), **options):
    costs, chances, cost = CostModel(), AcceptanceModel(), DraftCost(prior)
    for window in (1, 2, 3, 5, 9, 17):
        costs.record(1, window, 0.1 * (1 + 0.02 * window))
    for drafted, accepted in acceptance:
        chances.record(3, drafted, accepted)
    return Controller(costs, chances, fixed=None, largest=48, draft_cost=cost, **options)


def test_e01_the_cost_of_drafting_counts():
    """Dear or useless draft models are not used, but for probes that cost one percent."""
    right = [(4, 4)] * 40
    sizes = [controller(prior, right).draft_size(1, [3]) for prior in (0.0, 0.02, 0.1, 0.5)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] >= 24 and sizes[-1] >= 1
    for dear, least in (
        (controller(3.0, right), 150),  # loses two steps' time a probe
        (controller(1.0, [(4, 0)] * 40), 80),
        (controller(0.3, [(4, 0)] * 40), 10),
    ):
        tried = []
        for _ in range(1000):
            tried.append(dear.draft_size(1, [3]))
            dear.record([3], [tried[-1]], [0])
        probes = [i for i, size in enumerate(tried) if size]
        assert set(tried) == {0, 1} and probes[0] >= least and len(probes) > 1
        assert min(b - a for a, b in pairwise(probes)) >= least


def test_lookups_are_probed_as_before():
    """Their cost is next to nothing: the first step that can draft tries."""
    costs, chances = CostModel(), AcceptanceModel()
    costs.record(1, 1, 0.1)
    costs.record(1, 2, 0.12)
    for _ in range(40):
        chances.record(1, 4, 0)
    free = Controller(costs, chances, fixed=None, largest=48)
    assert free.draft_size(1, [1]) == 1
    free.record([1], [1], [0])
    assert [free.draft_size(1, [1]) for _ in range(3)] == [0, 0, 1]


def test_measured_costs_replace_the_prior():
    right = [(4, 4)] * 40
    adaptive = controller(3.0, right)
    for seconds in (0.001, 0.001, 5.0, 0.001):
        adaptive.draft_cost.record(1, 4, 4 * seconds)
    assert adaptive.draft_cost.per_token(1, 0.1) == 0.001
    assert adaptive.draft_cost.per_token(2, 0.1) == pytest.approx(0.3)
    assert adaptive.draft_size(1, [3]) >= 16


def test_adaptive_sizes_respect_the_shortest_draft():
    right = [(4, 4)] * 40
    assert controller(0.3, right, smallest=5).draft_size(1, [3]) >= 5
    useless = controller(0.3, [(4, 0)] * 40, smallest=5)
    assert {useless.draft_size(1, [3]) for _ in range(500)} == {0, 5}
    first = Controller(
        CostModel(), AcceptanceModel(), fixed=None, largest=48, smallest=20,
        draft_cost=DraftCost(0.01),
    )  # fmt: skip
    assert first.draft_size(1, [3]) in (0, 20)
