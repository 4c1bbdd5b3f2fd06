"""The specification of rejection_sample in plain PyTorch.

Every random decision goes through a `Chance`, one of two kinds: a draft is accepted or not, a token
is drawn. Given fp64 everything is computed in fp64, so a Chance that follows both outcomes and adds
up their probabilities gives the exact distribution of what a rule emits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.ops import _numerics, _random
from specdec_kernels.ops.sample.reference import (
    Rows,
    Uniforms,
    edit,
    gumbel_argmax,
    in_working_precision,
    mass_as_float,
    masses,
    prepare,
    to_mass,
)
from specdec_kernels.ops.verify_greedy.reference import (
    children,
    empty_acceptance,
    valid_slots,
)
from specdec_kernels.tree import STATUS_EMPTY, STATUS_NAN, Acceptance, SamplingParams


class Chance:
    """The coins and the noise of one row at one counter (its position or its step)."""

    def __init__(self, seed: Tensor, counter: Tensor, uniforms: Uniforms) -> None:
        self.seed, self.counter, self.uniforms = seed, counter, uniforms

    def accepts(self, slot: int, draft: Tensor, target: Tensor) -> bool:
        """With probability min(1, target / draft); never when target is 0."""
        coins = self.uniforms(self.seed, self.counter, _random.ACCEPT, slot + 1)
        return bool(coins[0, slot] * draft < target)

    def draws(self, scores: Tensor, stream: int) -> int:
        """A token from softmax(scores)."""
        return int(
            gumbel_argmax(scores, self.uniforms(self.seed, self.counter, stream, len(scores))[0])
        )


MakeChance = Callable[[Tensor, Tensor, Uniforms], Chance]


def rejection_sample(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    sampling: SamplingParams,
    draft_logits: Tensor | None,
    draft_vocab_map: Tensor | None,
    rule: str,
    posterior_threshold: float = 0.09,
    posterior_alpha: float = 0.3,
    uniforms: Uniforms = _random.uniforms,
    chance: MakeChance = Chance,
) -> Acceptance:
    rule = resolve(rule, draft_logits)
    valid = valid_slots(num_nodes, draft_token_ids.shape[1])
    expect_chains(rule, parents, num_nodes, draft_logits is not None)
    row = valid.nonzero()[:, 0]
    edits = sampling.edits
    if edits.allowed_tokens is not None:
        edits = edits._replace(allowed_tokens=edits.allowed_tokens[valid])
    path = drafted_ancestors(draft_token_ids, parents, valid)[valid]
    logits = edit(target_logits[valid], edits, row, path)
    rows = prepare(logits, *(x[row] for x in sampling[:4]))
    result = empty_acceptance(draft_token_ids)
    start = 0
    for b, count in enumerate(valid.sum(-1).tolist()):
        if count == 0:
            continue
        window = Window(
            Rows(*(field[start : start + count] for field in rows)),
            draft_token_ids[b].tolist(),
            [children(parents[b].tolist(), slot, count) for slot in range(count)],
            None if draft_logits is None else draft_logits[b],
            draft_vocab_map,
        )
        start += count
        seed = sampling.seed[b : b + 1]
        if rule == "block":
            steps = block(window, chance(seed, sampling.step[b : b + 1], uniforms))
        else:
            chances = [
                chance(seed, sampling.position[b : b + 1] + depth, uniforms)
                for depth in range(count)
            ]
            if rule == "typical":
                steps = typical(window, chances, posterior_threshold, posterior_alpha)
            else:
                steps = walk(window, chances, coupled if rule == "coupled" else recursive)
        for i, (slot, token, status) in enumerate(steps):
            result.path[b, i], result.output_token_ids[b, i] = slot, token
            result.status[b] |= status
        result.num_accepted[b] = len(steps) - 1
    return result


def resolve(rule: str, draft_logits: Tensor | None) -> str:
    """`auto` is coupled for deterministic drafts, recursive for sampled ones."""
    if rule == "auto":
        return "coupled" if draft_logits is None else "recursive"
    return rule


def expect_chains(rule: str, parents: Tensor, num_nodes: Tensor, has_draft_logits: bool) -> None:
    """`block` and, with draft logits, `token` speak of chains only."""
    if rule != "block" and not (rule == "token" and has_draft_logits):
        return
    slots = torch.arange(-1, parents.shape[1] - 1, device=parents.device)
    valid = valid_slots(num_nodes, parents.shape[1])
    if bool(((parents != slots) & valid)[:, 1:].any()):
        which = "rule 'block'" if rule == "block" else "rule 'token' with draft_logits"
        raise ValueError(
            f"rejection_sample: {which} expected chains (one child per node), got a tree; "
            "rule 'recursive' is the one for trees with draft_logits"
        )


def drafted_ancestors(draft_token_ids: Tensor, parents: Tensor, valid: Tensor) -> Tensor:
    """Drafted tokens on the way from the root to each slot, the slot included, [B, T, T]."""
    batch, width = parents.shape
    path = torch.full((batch, width, width), -1, dtype=torch.int64, device=parents.device)
    for b, count in enumerate(valid.sum(-1).tolist()):
        for slot in range(1, count):
            parent = int(parents[b, slot])
            if 0 <= parent < slot:
                path[b, slot] = path[b, parent]
            path[b, slot, slot] = draft_token_ids[b, slot]
    return path


Step = tuple[int, int, int]  # slot, the token emitted after it, status


class Window(NamedTuple):
    """One row of the batch: its target rows and its drafts."""

    rows: Rows
    tokens: list[int]
    children: list[list[int]]
    draft_logits: Tensor | None
    vocab_map: Tensor | None

    @property
    def vocab(self) -> int:
        return self.rows.logits.shape[-1]

    def scores(self, slot: int) -> Tensor:
        """Logits of the tokens that can be emitted after the slot, -infinity for all others."""
        if bool(self.rows.decided[slot]):
            scores = torch.full_like(self.rows.logits[slot], -math.inf)
            scores[self.rows.greedy[slot]] = 0.0
            return scores
        return torch.where(self.rows.kept[slot], self.rows.logits[slot], -math.inf)

    def target(self, slot: int) -> Tensor:
        """Probabilities [V] of the token after the slot."""
        scores = self.scores(slot)
        total = mass_as_float(masses(scores, scores > -math.inf).sum(), self.vocab)
        return torch.where(scores > -math.inf, _numerics.exp(scores) / total, 0.0)

    def draft(self, slot: int) -> tuple[Tensor, int]:
        """Probabilities of the slot's children, on the target's ids, and the status."""
        assert self.draft_logits is not None
        return draft_probabilities(self.draft_logits[slot], self.vocab_map, self.vocab)

    def status(self, slot: int) -> int:
        return int(self.rows.status[slot])

    def child_with(self, slot: int, token: int) -> int | None:
        return next((c for c in self.children[slot] if self.tokens[c] == token), None)


def draft_probabilities(logits: Tensor, vocab_map: Tensor | None, vocab: int) -> tuple[Tensor, int]:
    """softmax(logits) on the target's ids, and the status; a bad row gives nothing but zeros.

    Without a map the result has the larger of both vocabularies.
    """
    logits = in_working_precision(logits)
    result = logits.new_zeros(vocab if vocab_map is not None else max(vocab, len(logits)))
    largest = logits.amax()
    if bool(logits.isnan().any()):
        return result, STATUS_NAN
    if float(largest) == -math.inf:
        return result, STATUS_EMPTY
    centred = logits - largest
    if float(largest) == math.inf:
        centred = torch.where(logits == math.inf, 0.0, -math.inf).to(logits.dtype)
    ids = torch.arange(len(logits), device=logits.device) if vocab_map is None else vocab_map
    inside = (ids >= 0) & (ids < len(result))
    total = mass_as_float(masses(centred, centred > -math.inf).sum(), len(logits))
    result[ids[inside]] = (_numerics.exp(centred) / total)[inside]
    return result, 0


def walk(
    window: Window,
    chances: Sequence[Chance],
    decide: Callable[[Window, int, Chance], tuple[int | None, int, int]],
) -> list[Step]:
    """From the root to the first node of which no child is accepted."""
    steps: list[Step] = []
    slot: int | None = 0
    while slot is not None:
        child, token, status = decide(window, slot, chances[len(steps)])
        steps.append((slot, token, status | window.status(slot)))
        slot = child
    return steps


def coupled(window: Window, slot: int, chance: Chance) -> tuple[int | None, int, int]:
    """The target draws; a child that drafted the drawn token stands."""
    if bool(window.rows.decided[slot]):
        token = int(window.rows.greedy[slot])
    else:
        token = chance.draws(window.scores(slot), _random.BONUS)
    return window.child_with(slot, token), token, 0


def recursive(window: Window, slot: int, chance: Chance) -> tuple[int | None, int, int]:
    """Siblings in turn, each against what the rejected ones have left of target and draft.

    Accept with min(1, p/q); after a rejection p becomes norm(max(p - q, 0)) and q loses the tried
    token (Jeon et al., "Recursive speculative decoding", 2024). For one child it is rule `token`.
    """
    scores, kids = window.scores(slot), window.children[slot]
    if bool(window.rows.decided[slot]):
        token = int(window.rows.greedy[slot])
        return window.child_with(slot, token), token, 0
    if not kids:
        return None, chance.draws(scores, _random.BONUS), 0
    if window.draft_logits is None:
        return (*against_one_hot(window, slot, chance), 0)
    draft, status = window.draft(slot)
    if status:
        return None, chance.draws(scores, _random.RESIDUAL), status
    return (*against(window, slot, draft, chance), 0)


def against(window: Window, slot: int, draft: Tensor, chance: Chance) -> tuple[int | None, int]:
    target, vocab = window.target(slot), window.vocab
    target_total = draft_total = target.new_ones(())
    draft_mass = to_mass(draft)
    for child in window.children[slot]:
        token = window.tokens[child]
        if 0 <= token < vocab and chance.accepts(
            child, draft[token] / draft_total, target[token] / target_total
        ):
            return child, token
        target = (target / target_total - draft[:vocab] / draft_total).clamp(min=0.0)
        target_total = mass_as_float(to_mass(target).sum(), vocab)
        if 0 <= token < len(draft):
            draft[token], draft_mass[token] = 0.0, 0
        draft_total = mass_as_float(draft_mass.sum(), len(draft))
        if float(target_total) == 0.0 or float(draft_total) == 0.0:
            break
    return None, chance.draws(residual_scores(target, window.scores(slot)), _random.RESIDUAL)


def residual_scores(residual: Tensor, otherwise: Tensor) -> Tensor:
    """log(residual); where the residual is empty, the target's own scores."""
    scores = _numerics.log(residual)
    return otherwise if bool((scores == -math.inf).all()) else scores


def against_one_hot(window: Window, slot: int, chance: Chance) -> tuple[int | None, int]:
    """Siblings in turn, each against the target without those already rejected."""
    scores = window.scores(slot)
    left = scores > -math.inf
    mass = masses(scores, left)
    for child in window.children[slot]:
        token = window.tokens[child]
        if not (0 <= token < window.vocab and bool(left[token])):
            continue
        total = mass_as_float((mass * left).sum(), window.vocab)
        if chance.accepts(child, total.new_ones(()), _numerics.exp(scores[token]) / total):
            return child, token
        left[token] = False
    if not bool(left.any()):
        left = scores > -math.inf
    return None, chance.draws(torch.where(left, scores, -math.inf), _random.RESIDUAL)


def block(window: Window, chance: Chance) -> list[Step]:
    """A chain is accepted as a whole (Sun et al., "Block verification accelerates speculative
    decoding", 2024).

    With w_0 = 1 and w_i = min(w_{i-1} p(x_i) / q(x_i), 1), node i stands with probability
    m_i / (m_i + 1 - w_i), m_i the mass of max(w_i p - q, 0), and the last node with w_i. The draft
    is kept up to the last node that stands, then max(w p - q, 0) is drawn from. A draft row that is
    NaN or empty ends the chain before its child.
    """
    one = window.rows.logits.new_ones(())
    weight, last, residual, status = one, 0, None, 0
    for slot in range(len(window.children)):
        status |= window.status(slot)
        draft, left = None, None
        if window.children[slot]:
            draft, draft_status = block_draft(window, slot)
            status |= draft_status
        if draft is not None:
            left = (weight * window.target(slot) - draft[: window.vocab]).clamp(min=0.0)
        if slot == 0 or chance.accepts(slot, one, stands(weight, left)):
            last, residual = slot, left
        if draft is None:
            break
        weight = next_weight(window, slot, weight, draft)
        if float(weight) == 0.0:
            break
    scores = window.scores(last)
    if bool(window.rows.decided[last]):
        token = int(window.rows.greedy[last])
    elif residual is None:
        token = chance.draws(scores, _random.BONUS)
    else:
        token = chance.draws(residual_scores(residual, scores), _random.RESIDUAL)
    return [(slot, t, status) for slot, t in enumerate([*window.tokens[1 : last + 1], token])]


def block_draft(window: Window, slot: int) -> tuple[Tensor | None, int]:
    if window.draft_logits is not None:
        draft, status = window.draft(slot)
        return (None if status else draft), status
    draft, token = torch.zeros_like(window.rows.logits[slot]), window.tokens[slot + 1]
    if 0 <= token < window.vocab:
        draft[token] = 1.0
    return draft, 0


def stands(weight: Tensor, left: Tensor | None) -> Tensor:
    if left is None or float(weight) >= 1.0:
        return weight
    mass = mass_as_float(to_mass(left).sum(), len(left))
    return mass / (mass + (1.0 - weight))


def next_weight(window: Window, slot: int, weight: Tensor, draft: Tensor) -> Tensor:
    token = window.tokens[slot + 1]
    if not 0 <= token < window.vocab:
        return weight.new_zeros(())
    joint = weight * window.target(slot)[token]
    if float(joint) == 0.0:
        return joint
    return weight.new_ones(()) if bool(joint >= draft[token]) else joint / draft[token]


def typical(
    window: Window, chances: Sequence[Chance], threshold: float, alpha: float
) -> list[Step]:
    """Lossy: a token stands when p > min(threshold, alpha exp(-entropy of p)) (Cai et al.,
    "Medusa", 2024). The deepest node that stands is kept, the lowest slot among equals.
    """
    paths: dict[int, list[int]] = {0: [0]}
    best = [0]
    for slot in range(len(window.children)):
        if slot not in paths or not window.children[slot]:
            continue
        target = window.target(slot)
        bound = typical_bound(window, slot, threshold, alpha)
        for child in window.children[slot]:
            token = window.tokens[child]
            if 0 <= token < window.vocab and bool(target[token] > bound):
                paths[child] = [*paths[slot], child]
                best = max(best, paths[child], key=lambda path: (len(path), -path[-1]))
    _, token, _ = coupled(window, best[-1], chances[len(best) - 1])
    tokens = [window.tokens[slot] for slot in best[1:]]
    return [(slot, t, window.status(slot)) for slot, t in zip(best, [*tokens, token], strict=True)]


def typical_bound(window: Window, slot: int, threshold: float, alpha: float) -> Tensor:
    scores = window.scores(slot)
    kept = scores > -math.inf
    weights = torch.where(kept, _numerics.exp(scores), 0.0)
    total = mass_as_float(to_mass(weights).sum(), window.vocab)
    spread = mass_as_float(to_mass(torch.where(kept, weights * -scores, 0.0)).sum(), window.vocab)
    entropy = _numerics.log(total) + spread / total
    bound = scores.new_tensor(alpha) * _numerics.exp(-entropy)
    return torch.minimum(bound, scores.new_tensor(threshold))
