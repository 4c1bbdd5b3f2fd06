"""The exact distribution of a verification: the reference, followed through every outcome."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.ops.rejection_sample import reference
from specdec_kernels.testing.decoder import Drafts, best_draws
from specdec_kernels.testing.toy import Filters, ToyModel, conditionals, processed
from specdec_kernels.tree import SamplingParams

Tokens = tuple[int, ...]
Law = dict[Tokens, float]


class Script(reference.Chance):
    """Follows every outcome of one row's decisions, depth first, by replaying the call.

    `probability` is that of the outcome that the last replay followed.
    """

    def __init__(self) -> None:
        self._pending: list[list[int]] = [[]]
        self._choices: list[int] = []
        self._next = 0
        self.probability = 1.0

    def replay(self) -> bool:
        """Makes ready for the next outcome; False when there is none left."""
        if not self._pending:
            return False
        self._choices, self._next, self.probability = self._pending.pop(), 0, 1.0
        return True

    def _choose(self, probabilities: Sequence[float]) -> int:
        if self._next == len(self._choices):
            first, *others = [i for i, p in enumerate(probabilities) if p > 0]
            self._pending += [[*self._choices, other] for other in others]
            self._choices.append(first)
        choice = self._choices[self._next]
        self._next += 1
        self.probability *= probabilities[choice]
        return choice

    def accepts(self, slot: int, draft: Tensor, target: Tensor) -> bool:
        accept = 0.0
        if float(target) > 0:
            accept = 1.0 if bool(target >= draft) else float(target / draft)
        return self._choose([1.0 - accept, accept]) == 1

    def draws(self, scores: Tensor, stream: int) -> int:
        return self._choose(torch.softmax(scores, -1).tolist())


def exact_laws(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    parents: Tensor,
    sampling: SamplingParams,
    *,
    rule: str,
    draft_logits: Tensor | None = None,
    draft_vocab_map: Tensor | None = None,
) -> list[Law]:
    """exact_law of every row of a batch: target_logits [B, T, V], and so on."""
    rows = torch.arange(len(draft_token_ids))
    scripts = [Script() for _ in rows]
    laws: list[Law] = [{} for _ in rows]
    nodes = torch.full_like(parents[:, 0], parents.shape[1])
    sampling = sampling._replace(seed=rows)
    while len(rows := rows[[scripts[row].replay() for row in rows.tolist()]]):
        result = reference.rejection_sample(
            target_logits[rows],
            draft_token_ids[rows],
            parents[rows],
            nodes[rows],
            sampling.at(rows),
            None if draft_logits is None else draft_logits[rows],
            draft_vocab_map,
            rule,
            chance=lambda seed, counter, uniforms: scripts[int(seed)],
        )
        counts = (result.num_accepted + 1).tolist()
        for row, count, tokens in zip(
            rows.tolist(), counts, result.output_token_ids.tolist(), strict=True
        ):
            emitted = tuple(tokens[:count])
            laws[row][emitted] = laws[row].get(emitted, 0.0) + scripts[row].probability
    return laws


def exact_law(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    parents: Tensor,
    sampling: SamplingParams,
    *,
    rule: str,
    draft_logits: Tensor | None = None,
    draft_vocab_map: Tensor | None = None,
) -> Law:
    """Probabilities of the tokens that one verification of a given window emits.

    Args:
        target_logits: raw [T, V], fp64 for exact numbers; draft_token_ids, parents: [T].
        sampling: one row. rule, draft_logits [T, Vd], draft_vocab_map: as for rejection_sample.
    """
    (law,) = exact_laws(
        target_logits.unsqueeze(0),
        draft_token_ids.unsqueeze(0),
        parents.unsqueeze(0),
        sampling,
        rule=rule,
        draft_logits=None if draft_logits is None else draft_logits.unsqueeze(0),
        draft_vocab_map=draft_vocab_map,
    )
    return law


class DraftedWindows(NamedTuple):
    """Every window that can be drafted, [W, T] each, and its probability [W]."""

    probability: Tensor
    before: Tensor
    draft_token_ids: Tensor
    draft_logits: Tensor

    def at(self, rows: Tensor) -> DraftedWindows:
        return DraftedWindows._make(field[rows] for field in self)


def drafted_windows(
    drafts: Drafts, model: ToyModel, prompt: tuple[int, int], vocab_map: Tensor | None = None
) -> DraftedWindows:
    """Behind a prompt, in fp64. Siblings that find nothing left to draw are -1."""
    width, outputs = len(drafts.parents), model.table.shape[-1]
    windows = DraftedWindows(
        torch.ones(1, dtype=torch.float64),
        torch.tensor([[prompt[0]] * width]),
        torch.tensor([[prompt[1]] * width]),
        torch.full((1, width, outputs), math.nan, dtype=torch.float64),
    )
    for slot, kids in enumerate(drafts.children):
        if not kids:
            continue
        ids = windows.draft_token_ids
        logits = model.logits(windows.before[:, slot], ids[:, slot]).double()
        text = torch.tensor([prompt]).expand(len(ids), -1)
        zeros = torch.zeros_like(text[:, 0])
        sampling = drafts.filters.sampling(
            text, text[:, :0], outputs, seed=zeros, position=zeros, step=zeros
        )
        logits = processed(logits, sampling, ids[:, drafts.ancestors(slot)])
        windows.draft_logits[:, slot] = logits
        windows.before[:, kids] = ids[:, slot : slot + 1]
        if drafts.sampled:
            windows = _draw_all(windows, slot, kids, vocab_map)
        else:
            best = best_draws(logits, sampling, 0, len(kids))
            ids[:, kids] = best if vocab_map is None else vocab_map[best]
    return windows


def _draw_all(
    windows: DraftedWindows, slot: int, kids: list[int], vocab_map: Tensor | None
) -> DraftedWindows:
    """Each window once per sequence of distinct tokens that its slot's children can be."""
    left = torch.softmax(windows.draft_logits[:, slot], -1)
    outputs = left.shape[1]
    for kid in kids:
        total = left.sum(-1, keepdim=True)
        chances = torch.cat([torch.where(total > 0, left / total, 0.0), (total == 0).double()], 1)
        rows, drawn = chances.nonzero().unbind(1)
        windows, left = windows.at(rows), left[rows]
        windows.probability.mul_(chances[rows, drawn])
        left[torch.arange(len(rows)), drawn.clamp(max=outputs - 1)] = 0.0
        tokens = drawn if vocab_map is None else vocab_map[drawn.clamp(max=outputs - 1)]
        windows.draft_token_ids[:, kid] = torch.where(drawn == outputs, -1, tokens)
    return windows


def step_law(
    target: ToyModel,
    draft: ToyModel,
    drafts: Drafts,
    prompt: tuple[int, int],
    filters: Filters,
    rule: str,
    vocab_map: Tensor | None = None,
) -> Law:
    """Probabilities of what one step emits behind a prompt, over all drafts that can be drawn."""
    windows = drafted_windows(drafts, draft, prompt, vocab_map)
    ids = windows.draft_token_ids
    text = torch.tensor([prompt]).expand(len(ids), -1)
    zeros = torch.zeros_like(text[:, 0])
    laws = exact_laws(
        target.logits(windows.before, ids).double(),
        ids,
        torch.tensor([drafts.parents], dtype=torch.int32).repeat(len(ids), 1),
        filters.sampling(text, text[:, :0], target.vocab, seed=zeros, position=zeros, step=zeros),
        rule=rule,
        draft_logits=windows.draft_logits if drafts.sampled else None,
        draft_vocab_map=vocab_map if drafts.sampled else None,
    )
    result: Law = {}
    for weight, law in zip(windows.probability.tolist(), laws, strict=True):
        for tokens, probability in law.items():
            result[tokens] = result.get(tokens, 0.0) + weight * probability
    return result


def complete(law: Law, target: list[Tensor]) -> Tensor:
    """The joint of the next n tokens when what a step leaves open comes from the target.

    target: `conditionals` of n tokens, at least as many as the step can emit. [V] * n.
    """
    joint = torch.zeros_like(target[-1])
    for tokens, probability in law.items():
        rest = torch.ones((), dtype=joint.dtype)
        for row in target[len(tokens) :]:
            rest = rest.unsqueeze(-1) * row[tokens]
        joint[tokens] += probability * rest
    return joint


def step_joint(
    target: ToyModel,
    draft: ToyModel,
    drafts: Drafts,
    prompt: tuple[int, int],
    filters: Filters,
    rule: str,
    vocab_map: Tensor | None = None,
) -> Tensor:
    """The joint of the next depth + 1 tokens: that of the target, if the rule is lossless."""
    law = step_law(target, draft, drafts, prompt, filters, rule, vocab_map)
    return complete(law, conditionals(target, prompt, max(drafts.depths) + 1, filters))
