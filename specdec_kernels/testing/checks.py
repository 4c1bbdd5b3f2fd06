"""The suite: what a sampler emits, held to distributions that are known exactly."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.testing.decoder import (
    Decoder,
    Drafts,
    Draw,
    InvalidAcceptance,
    Verify,
    draws_for,
)
from specdec_kernels.testing.exact import step_law
from specdec_kernels.testing.invariance import impossible_drafts, seed_alone_decides
from specdec_kernels.testing.report import Check, Report
from specdec_kernels.testing.statistics import (
    chi_square_pvalue,
    count_cells,
    smallest_pvalue,
    worst_marginal,
)
from specdec_kernels.testing.toy import Filters, ToyModel, conditionals, exact_joint, sequences

VOCAB = 4
PROMPTS = ((0, 1), (2, 0), (1, 1))
ROWS = 200_000
_CHUNK = 1 << 15
_LONGEST = 10  # tokens whose joint is enumerated
_FEWEST = 50  # p-values as small as those of many checks at 1e-6 need it

FILTERS = {
    "temperature": Filters(temperature=0.8),
    "every filter": Filters(
        temperature=1.2,
        top_k=3,
        top_p=0.97,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        bias=(0.4, -0.3, 0.0, 0.2),
    ),
}
_ALIKE = Filters(temperature=1.2)
_UNLIKE = Filters(temperature=2.0, bias=(1.0, -1.0, 1.0, -1.0))
# Shared noise shows where drafts are often rejected, a wrong key of long blocks where they stand.
WINDOWS = {
    "sampled chain": Drafts.chain(2, filters=_UNLIKE),
    "long sampled chain": Drafts.chain(3, filters=_ALIKE),
    "sampled tree": Drafts((-1, 0, 0, 1, 2), filters=_UNLIKE),
    "deterministic chain": Drafts.chain(2, sampled=False),
    "deterministic tree": Drafts((-1, 0, 0, 1, 2), sampled=False),
}
WINDOWS_OF_RULE = {
    None: ("sampled chain", "long sampled chain"),
    "auto": ("sampled chain", "sampled tree", "deterministic tree"),
    "coupled": ("sampled chain", "deterministic tree"),
    "token": ("sampled chain", "deterministic tree"),
    "recursive": ("sampled chain", "sampled tree", "deterministic tree"),
    "block": ("long sampled chain", "deterministic chain"),
}


def check_sampler(
    verify: Verify,
    *,
    rule: str | None = None,
    rows: int = ROWS,
    windows: Sequence[str] | Mapping[str, Drafts] | None = None,
    filters: Mapping[str, Filters] = FILTERS,
    draw: Draw | None = None,
    seeded: bool = True,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Report:
    """Holds a sampler to the exact distribution that it must not change.

    Args:
        verify: called as `verify(target_logits [B, T, V], draft_token_ids [B, T], parents [B, T],
            num_nodes [B], sampling, draft_logits=[B, T, V] or None)`, returns an Acceptance. Which
            filters `sampling` holds is chosen by `filters`; draft_logits are those whose plain
            softmax the drafts were drawn from, NaN where there are none.
        rule: auto, coupled, token, recursive or block; the acceptance rate and the recovered tokens
            are held to it. None: a rule of one's own, of which only the emitted text is known.
        rows: sequences decoded per window and setting.
        windows: names out of WINDOWS, or Drafts by name; None takes those that the rule allows.
        filters: the settings of the target's sampling, by name.
        draw: how drafts are drawn, (logits, sampling, depth, count) to ids [B, count]; by default
            with the package's own draft noise (see `gumbel_draws`).
        seeded: the sampler has no state, `sampling` decides alone: batch and padding must not.
        seed: of the first row.
    """
    checks: list[Check] = []
    for name, drafts in _chosen(windows, rule).items():
        case = _Case(verify, rule, rows, drafts, draw or draws_for(rule), seed, device)
        first = next(iter(filters.values()))
        try:
            for setting, values in filters.items():
                checks += case.decoding(f"{name}, {setting}", values)
            checks += case.one_step(name, first)
            impossible = f"{name}: impossible drafts"
            checks.append(impossible_drafts(impossible, verify, drafts, device))
            if seeded:
                alone = f"{name}: seed alone decides"
                checks.append(seed_alone_decides(alone, verify, case.decoder(first)))
        except InvalidAcceptance as error:
            checks.append(Check.of(f"{name}: acceptance", False, str(error)))
    return Report(tuple(checks))


def _chosen(
    windows: Sequence[str] | Mapping[str, Drafts] | None, rule: str | None
) -> Mapping[str, Drafts]:
    def expect(what: str, value: str | None, known: Iterable[str | None]) -> None:
        if value not in known:
            names = ", ".join(map(str, known))
            raise ValueError(f"check_sampler: expected {what} of {names}; got {value!r}")

    expect("rule as one", rule, WINDOWS_OF_RULE)
    if isinstance(windows, Mapping):
        return windows
    names = WINDOWS_OF_RULE[rule] if windows is None else windows
    for name in names:
        expect("windows out", name, WINDOWS)
    return {name: WINDOWS[name] for name in names}


@cache
def toy_models(device: torch.device | str = "cpu") -> tuple[ToyModel, ToyModel]:
    """The suite's target and its draft model."""
    target = ToyModel(VOCAB, 1, scale=1.2, device=device)
    return target, target.draft_of(0.6, 2)


@cache
def _joint(filters: Filters, num_tokens: int) -> Tensor:
    """For each prompt, [prompts, V, V, ...]."""
    model, _ = toy_models()
    return torch.stack([exact_joint(model, prompt, num_tokens, filters) for prompt in PROMPTS])


@cache
def _emissions(drafts: Drafts, filters: Filters, rule: str) -> Tensor:
    """The law of one step behind the first prompt, laid out as by `_count_emissions`."""
    law = step_law(*toy_models(), drafts, PROMPTS[0], filters, rule)
    size = max(drafts.depths) + 1
    result = torch.zeros((VOCAB + 1,) * size, dtype=torch.float64)
    for tokens, probability in law.items():
        result[tokens + (VOCAB,) * (size - len(tokens))] = probability
    return result


def _count_emissions(tokens: Tensor) -> Tensor:
    """Counts of emitted tokens [N, size], -1 padded; index V stands for the padding."""
    return count_cells(torch.where(tokens < 0, VOCAB, tokens), VOCAB + 1)


class _Case(NamedTuple):
    """A sampler on one kind of window."""

    verify: Verify
    rule: str | None
    rows: int
    drafts: Drafts
    draw: Draw
    seed: int
    device: torch.device | str

    @property
    def depth(self) -> int:
        return max(self.drafts.depths)

    def decoder(self, filters: Filters) -> Decoder:
        return Decoder(*toy_models(self.device), self.drafts, filters, self.draw, PROMPTS)

    def seeds(self) -> Iterator[Tensor]:
        return iter((self.seed + torch.arange(self.rows, device=self.device)).split(_CHUNK))

    def decoding(self, name: str, filters: Filters) -> list[Check]:
        """The joint of what three verifications or more emit (two of deep drafts), and pairs."""
        size, steps = min(2 * (self.depth + 1) + 1, _LONGEST), 0
        joint = _joint(filters, size)
        counts = torch.zeros(joint.shape, dtype=torch.int64)
        decoder = self.decoder(filters)
        for seeds in self.seeds():
            text = decoder.run(self.verify, seeds, size)
            tokens, prompts = text.generated[:, :size].cpu(), seeds.cpu() % len(PROMPTS)
            for prompt in range(len(PROMPTS)):
                counts[prompt] += count_cells(tokens[prompts == prompt], VOCAB)
            steps += int(text.step.sum())
        runs = [(0, *range(i, i + 4)) for i in range(1, size - 2)]
        pairs = [(0, *pair) for pair in itertools.combinations(range(1, size + 1), 2)]
        checks = []
        for what, subsets in ((f"joint of {size} tokens", [tuple(range(size + 1)), *runs]),
                              ("pairs of tokens", pairs)):  # fmt: skip
            pvalue, worst = worst_marginal(counts, joint, subsets, _FEWEST)
            tokens_of = " ".join(map(str, worst[1:]))
            detail = f"{steps / self.rows:.1f} steps; differs most at tokens {tokens_of}"
            checks.append(Check(f"{name}: {what}", pvalue, detail))
        return checks

    def one_step(self, name: str, filters: Filters) -> list[Check]:
        """One verification behind one prompt: how much stands, and what follows in either case."""
        counts = torch.zeros((VOCAB + 1,) * (self.depth + 1), dtype=torch.int64)
        decoder = self.decoder(filters)._replace(prompts=PROMPTS[:1])
        for seeds in self.seeds():
            _, result = decoder.step(self.verify, decoder.start(seeds, self.depth + 1))
            counts += _count_emissions(result.output_token_ids[:, : self.depth + 1].cpu())
        checks = []
        if self.rule is not None:
            law = _emissions(self.drafts, filters, self.rule)
            checks.append(_acceptance_rate(f"{name}: acceptance rate", counts, law))
            recovered = [_next_token(counts, law, length) for length in range(self.depth)]
            pvalue = smallest_pvalue([p for pvalues in recovered for p in pvalues])
            checks.append(Check(f"{name}: recovered token given rejection", pvalue))
        bonus_counts = counts[(slice(VOCAB),) * (self.depth + 1)].reshape(-1, VOCAB)
        exact = conditionals(toy_models()[0], PROMPTS[0], self.depth + 1, filters)[-1]
        pvalues = _row_pvalues(bonus_counts, exact.reshape(-1, VOCAB))
        name = f"{name}: bonus token given acceptance"
        return [*checks, Check(name, smallest_pvalue(pvalues), f"{int(bonus_counts.sum())} drawn")]


def _acceptance_rate(name: str, counts: Tensor, law: Tensor) -> Check:
    size = counts.dim()
    accepted = ((sequences(VOCAB + 1, size) < VOCAB).sum(1) - 1).clamp(min=0)
    found, exact = (
        torch.zeros(size, dtype=torch.float64).index_add(0, accepted, x.flatten().double())
        for x in (counts, law)
    )
    means = [float((x * torch.arange(size)).sum() / x.sum()) for x in (found, exact)]
    detail = f"{means[0]:.4f} drafts a step, exact {means[1]:.4f}"
    return Check(name, chi_square_pvalue(found, exact, _FEWEST), detail)


def _next_token(counts: Tensor, law: Tensor, length: int) -> list[float]:
    """Of the token emitted where exactly `length` drafts stood, for each way they can read."""
    inside = (slice(VOCAB),) * (length + 1)
    rows = [x[inside].flatten(length + 1)[..., -1].reshape(-1, VOCAB) for x in (counts, law)]
    return _row_pvalues(*rows)


def _row_pvalues(counts: Tensor, exact: Tensor) -> list[float]:
    return [
        chi_square_pvalue(row, wanted, _FEWEST)
        for row, wanted in zip(counts, exact, strict=True)
        if int(row.sum())
    ]
