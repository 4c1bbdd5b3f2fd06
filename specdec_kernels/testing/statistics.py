"""Counts against exact distributions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

FALSE_ALARM = 1e-6


def chi_square_pvalue(observed: Tensor, probabilities: Tensor, fewest: int = 5) -> float:
    """Pearson's test of counts against a distribution, both of one shape; it is normalised first.

    Cells expected fewer than `fewest` times are pooled. A drawn cell of probability 0 gives 0.
    Far out the tail of chi-square is too thin for rare cells: where one of four is expected 5
    times, p-values of 1e-8 are 80 times as frequent as they say, at 50 times three times.
    """
    observed, expected = observed.flatten().double(), probabilities.flatten().double()
    if bool((observed[expected <= 0] > 0).any()):
        return 0.0
    expected = expected * (observed.sum() / expected.sum())
    order = expected.argsort()
    observed, expected = observed[order], expected[order]
    enough = int((expected.cumsum(0) < fewest).sum()) + 1
    pooled = min(max(int((expected < fewest).sum()), enough), len(expected))
    observed = torch.cat([observed[:pooled].sum().view(1), observed[pooled:]])
    expected = torch.cat([expected[:pooled].sum().view(1), expected[pooled:]])
    if len(expected) < 2:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.full_like(statistic, len(expected) - 1)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def total_variation(observed: Tensor, probabilities: Tensor) -> float:
    """Half the L1 distance; `observed` may be counts or probabilities."""
    observed, expected = observed.flatten().double(), probabilities.flatten().double()
    return float((observed / observed.sum() - expected / expected.sum()).abs().sum() / 2)


def smallest_pvalue(pvalues: Sequence[float]) -> float:
    """One p-value for several tests (Bonferroni)."""
    return min(1.0, min(pvalues, default=1.0) * len(pvalues))


def count_cells(tokens: Tensor, vocab: int) -> Tensor:
    """How often each sequence occurs: tokens [N, n] to counts [vocab] * n."""
    cells = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
    for i in range(tokens.shape[1]):
        cells = cells * vocab + tokens[:, i]
    return cells.bincount(minlength=vocab ** tokens.shape[1]).view((vocab,) * tokens.shape[1])


def marginal(joint: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Distribution (or counts) over some of the joint's dimensions, ascending."""
    others = [i for i in range(joint.dim()) if i not in dims]
    return joint.sum(others) if others else joint


def pair_marginals(joint: Tensor) -> dict[tuple[int, ...], Tensor]:
    """The distribution (or counts) of every two of the joint's dimensions."""
    return {pair: marginal(joint, pair) for pair in itertools.combinations(range(joint.dim()), 2)}


def worst_marginal(
    counts: Tensor, joint: Tensor, subsets: Iterable[tuple[int, ...]], fewest: int = 5
) -> tuple[float, tuple[int, ...]]:
    """One p-value for the marginals over some sets of dimensions, and the one that differs most."""
    pvalues = {
        dims: chi_square_pvalue(marginal(counts, dims), marginal(joint, dims), fewest)
        for dims in subsets
    }
    return smallest_pvalue(list(pvalues.values())), min(pvalues, key=lambda dims: pvalues[dims])
