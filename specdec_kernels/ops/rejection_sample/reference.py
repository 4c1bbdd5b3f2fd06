"""The specification of rejection_sample in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec_kernels.ops import _numerics, _random
from specdec_kernels.ops.sample.reference import (
    Rows,
    Uniforms,
    draw,
    gumbel_argmax,
    in_working_precision,
    mass_bits,
    masses,
    prepare,
)
from specdec_kernels.ops.verify_greedy.reference import (
    children,
    empty_acceptance,
    valid_slots,
    walk,
)
from specdec_kernels.tree import STATUS_EMPTY, STATUS_NAN, Acceptance


def rejection_sample(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    draft_logits: Tensor | None,
    draft_vocab_map: Tensor | None,
    rule: str,
    uniforms: Uniforms = _random.uniforms,
) -> Acceptance:
    valid = valid_slots(num_nodes, draft_token_ids.shape[1])
    row = valid.nonzero()[:, 0]
    where = position[row] + depths(parents, valid)[valid]
    filters = (temperature[row], top_k[row], top_p[row], min_p[row])
    rows = prepare(target_logits[valid], *filters)
    if rule == "coupled":
        tokens = draw(rows, seed[row], where, _random.BONUS, uniforms)
        return walk(tokens, rows.status, valid, draft_token_ids, parents)
    if draft_logits is not None:
        expect_chains(parents, num_nodes)
    result = empty_acceptance(draft_token_ids)
    starts = valid.sum(-1).cumsum(0) - valid.sum(-1)
    for b, count in enumerate(valid.sum(-1).tolist()):
        slot: int | None = 0 if count else None
        length = 0
        while slot is not None:
            at = slice(int(starts[b]) + slot, int(starts[b]) + slot + 1)
            kids = children(parents[b].tolist(), slot, count)
            node = Node(Rows(*(f[at] for f in rows)), seed[row][at], where[at], uniforms)
            drafted = [(c, int(draft_token_ids[b, c])) for c in kids]
            draft = draft_logits[b, slot] if draft_logits is not None and kids else None
            result.path[b, length] = slot
            result.num_accepted[b] = length
            slot, token, status = node.decide(drafted, draft, draft_vocab_map)
            result.output_token_ids[b, length] = token
            result.status[b] |= status
            length += 1
    return result


def depths(parents: Tensor, valid: Tensor) -> Tensor:
    depth = torch.zeros_like(parents, dtype=torch.int64)
    for b, count in enumerate(valid.sum(-1).tolist()):
        for slot in range(1, count):
            parent = int(parents[b, slot])
            depth[b, slot] = depth[b, parent] + 1 if 0 <= parent < slot else 0
    return depth


def expect_chains(parents: Tensor, num_nodes: Tensor) -> None:
    slots = torch.arange(-1, parents.shape[1] - 1, device=parents.device)
    if bool(((parents != slots) & valid_slots(num_nodes, parents.shape[1]))[:, 1:].any()):
        raise ValueError(
            "rejection_sample: rule 'token' with draft_logits expected chains (one child per "
            "node), got a tree; rule 'recursive' is the one for trees with draft_logits"
        )


def draft_probabilities(logits: Tensor, vocab_map: Tensor | None, vocab: int) -> tuple[Tensor, int]:
    """softmax(logits) on the target's ids, and the status; a bad row gives nothing but zeros."""
    logits = in_working_precision(logits)
    result = logits.new_zeros(vocab)
    largest = logits.amax()
    if bool(logits.isnan().any()):
        return result, STATUS_NAN
    if float(largest) == -math.inf:
        return result, STATUS_EMPTY
    centred = logits - largest
    if float(largest) == math.inf:
        centred = torch.where(logits == math.inf, 0.0, -math.inf).to(logits.dtype)
    ids = torch.arange(len(logits), device=logits.device) if vocab_map is None else vocab_map
    inside = (ids >= 0) & (ids < vocab)
    total = masses(centred, centred > -math.inf).sum()
    result[ids[inside]] = (_numerics.exp(centred) / as_float(total, len(logits), logits))[inside]
    return result, 0


def as_float(mass: Tensor, vocab: int, like: Tensor) -> Tensor:
    return (mass.double() * 2.0 ** -mass_bits(vocab)).to(like.dtype)


class Node:
    """One node of the tree under rule `token`: its target row, and the coins and noise it uses."""

    def __init__(self, rows: Rows, seed: Tensor, position: Tensor, uniforms: Uniforms) -> None:
        self.rows, self.seed, self.position, self.uniforms = rows, seed, position, uniforms
        self.logits, self.kept = rows.logits[0], rows.kept[0]
        self.vocab = len(self.logits)

    def coin(self, slot: int) -> Tensor:
        return self.uniforms(self.seed, self.position, _random.ACCEPT, slot + 1)[0, slot]

    def decide(
        self,
        drafted: list[tuple[int, int]],
        draft_logits: Tensor | None,
        vocab_map: Tensor | None,
    ) -> tuple[int | None, int, int]:
        """The accepted child or None, the token emitted, and the status."""
        status = int(self.rows.status[0])
        if bool(self.rows.decided[0]):
            token = int(self.rows.greedy[0])
            return next((c for c, x in drafted if x == token), None), token, status
        if not drafted:
            return None, self.drawn(self.logits, self.kept, _random.BONUS), status
        if draft_logits is None:
            return (*self.against_one_hot(drafted), status)
        draft, draft_status = draft_probabilities(draft_logits, vocab_map, self.vocab)
        if draft_status:
            token = self.drawn(self.logits, self.kept, _random.RESIDUAL)
            return None, token, status | draft_status
        return (*self.against(*drafted[0], draft), status)

    def drawn(self, scores: Tensor, kept: Tensor, stream: int) -> int:
        noise = self.uniforms(self.seed, self.position, stream, self.vocab)[0]
        return int(gumbel_argmax(torch.where(kept, scores, -math.inf), noise))

    def against(self, slot: int, token: int, draft: Tensor) -> tuple[int | None, int]:
        """Leviathan et al. 2023: accept with min(1, p/q), else draw from norm(max(p - q, 0))."""
        total = as_float(masses(self.logits, self.kept).sum(), self.vocab, self.logits)
        target = torch.where(self.kept, _numerics.exp(self.logits) / total, 0.0)
        if 0 <= token < self.vocab and bool(self.coin(slot) * draft[token] < target[token]):
            return slot, token
        scores = _numerics.log((target - draft).clamp(min=0.0))
        if bool((scores == -math.inf).all()):
            scores = self.logits
        return None, self.drawn(scores, self.kept, _random.RESIDUAL)

    def against_one_hot(self, drafted: list[tuple[int, int]]) -> tuple[int | None, int]:
        """Siblings in turn, each against the target without those already rejected."""
        left = self.kept.clone()
        mass = masses(self.logits, left)
        for slot, token in drafted:
            if not (0 <= token < self.vocab and bool(left[token])):
                continue
            total = as_float((mass * left).sum(), self.vocab, self.logits)
            if bool(self.coin(slot) < _numerics.exp(self.logits[token]) / total):
                return slot, token
            left[token] = False
        if not bool(left.any()):
            left = self.kept
        return None, self.drawn(self.logits, left, _random.RESIDUAL)
