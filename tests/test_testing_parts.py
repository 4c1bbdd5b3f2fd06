"""The parts of the shipped test suite: statistics and toy models."""

import pytest
import torch
from scipy import stats

from specdec_kernels.testing import (
    FALSE_ALARM,
    Filters,
    ToyModel,
    chi_square_pvalue,
    conditionals,
    count_cells,
    exact_joint,
    gumbel_draws,
    pair_marginals,
    total_variation,
)


def test_chi_square_is_that_of_scipy():
    g = torch.Generator().manual_seed(0)
    for cells, draws in ((4, 200), (50, 20_000), (3000, 500_000)):
        exact = torch.softmax(torch.randn(cells, generator=g).double() * 0.3, 0)
        counts = torch.multinomial(exact, draws, True, generator=g).bincount(minlength=cells)
        wanted = stats.chisquare(counts, exact * draws / exact.sum()).pvalue
        assert chi_square_pvalue(counts, exact) == pytest.approx(wanted, rel=1e-6)


def test_chi_square_pools_what_is_rare():
    exact = torch.tensor([0.5, 0.4999, 5e-5, 5e-5])
    counts = torch.tensor([5000, 4999, 1, 0])
    wanted = stats.chisquare([5001, 4999], [5000 * 1.0002, 4999 * 1.0]).pvalue
    assert chi_square_pvalue(counts, exact) == pytest.approx(wanted, abs=0.05)
    assert chi_square_pvalue(torch.tensor([1, 2]), torch.tensor([0.5, 0.5])) == 1.0


def test_what_cannot_be_drawn_has_no_chance():
    assert chi_square_pvalue(torch.tensor([999, 1]), torch.tensor([1.0, 0.0])) == 0.0
    assert chi_square_pvalue(torch.tensor([999, 0]), torch.tensor([1.0, 0.0])) == 1.0


def test_pvalues_of_sound_counts_are_uniform():
    g = torch.Generator().manual_seed(1)
    exact = torch.softmax(torch.randn(40, generator=g).double(), 0)
    pvalues = [
        chi_square_pvalue(
            torch.multinomial(exact, 4000, True, generator=g).bincount(minlength=40), exact
        )
        for _ in range(500)
    ]
    assert stats.kstest(pvalues, "uniform").pvalue > 1e-3


def test_cells_pairs_and_total_variation():
    tokens = torch.tensor([[0, 1, 2], [0, 1, 2], [2, 2, 0]])
    counts = count_cells(tokens, 3)
    assert counts.shape == (3, 3, 3) and counts.sum() == 3
    assert counts[0, 1, 2] == 2 and counts[2, 2, 0] == 1
    pairs = pair_marginals(counts)
    assert sorted(pairs) == [(0, 1), (0, 2), (1, 2)]
    assert pairs[0, 2][0, 2] == 2 and pairs[0, 2][2, 0] == 1
    assert total_variation(torch.tensor([3, 1]), torch.tensor([0.5, 0.5])) == pytest.approx(0.25)


# ---- toy models


def test_joint_of_the_toy_model_is_the_product_of_its_rows():
    model = ToyModel(3, 7)
    p = torch.softmax(model.table.double() / torch.tensor(0.7).double(), -1)
    joint = exact_joint(model, (2, 1), 3, Filters(temperature=0.7))
    for a in range(3):
        for b in range(3):
            wanted = p[2, 1, a] * p[1, a, b] * p[a, b]
            assert torch.allclose(joint[a, b], wanted, rtol=1e-6)


def test_penalties_of_the_toy_model_see_the_whole_text():
    """Once more with the definition of each penalty, for one sequence."""
    model, drawn = ToyModel(4, 3), (2, 2, 0)
    filters = Filters(
        repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2, bias=(1.0, 0, 0, -1.0)
    )
    found = conditionals(model, (0, 1), 4, filters)[3][drawn]
    logits = model.table[2, 0].double() + torch.tensor([1.0, 0, 0, -1.0])
    for token, count in ((0, 1), (1, 0), (2, 2)):
        logits[token] *= 1.5 if logits[token] < 0 else 1 / 1.5
        logits[token] -= 0.2 * count + 0.3 * (count > 0)
    assert torch.allclose(found, torch.softmax(logits, -1), atol=1e-7)


def test_siblings_are_drawn_without_replacement():
    """Gumbel's largest: the first from q, the second from q without the first."""
    rows = 60_000
    logits = torch.tensor([1.0, 0.0, -1.0, -torch.inf, 0.5])
    sampling = Filters().sampling(
        torch.zeros(rows, 2, dtype=torch.int64), torch.zeros(rows, 0, dtype=torch.int64), 5,
        seed=torch.arange(rows), position=torch.full((rows,), 4), step=torch.zeros(rows).long(),
    )  # fmt: skip
    drawn = gumbel_draws(logits.expand(rows, -1), sampling, 1, 5)
    assert (drawn[:, 4] == -1).all() and (drawn[:, :4] >= 0).all()
    q = torch.softmax(logits.double(), -1)
    exact = q.unsqueeze(1) * q / (1 - q).unsqueeze(1) * (1 - torch.eye(5))
    assert chi_square_pvalue(count_cells(drawn[:, :2], 5), exact) > FALSE_ALARM
