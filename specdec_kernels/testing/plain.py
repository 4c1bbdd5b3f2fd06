"""A verifier in plain PyTorch, vectorised over rows, whose faults can be switched on.

It follows the reference's rules on small vocabularies, a hundred thousand rows at a time, and draws
the same numbers. It knows no bad rows: NaN is for padding alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.ops import _random
from specdec_kernels.ops.rejection_sample.reference import resolve
from specdec_kernels.ops.verify_greedy.reference import empty_acceptance
from specdec_kernels.testing.toy import processed
from specdec_kernels.tree import Acceptance, SamplingParams

FAULTS = (
    "wrong_draft_probabilities",
    "accepts_on_equality",
    "stale_siblings",
    "position_keyed_block",
    "bonus_from_accept_coin",
)
_RULES = ("coupled", "token", "recursive", "block")


def plain_verify(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    sampling: SamplingParams,
    /,
    *,
    draft_logits: Tensor | None = None,
    rule: str,
    fault: str | None = None,
) -> Acceptance:
    """`rejection_sample`, all rules but `typical`, with at most one of FAULTS."""
    rule = resolve(rule, draft_logits)
    if rule not in _RULES or fault not in (None, *FAULTS):
        raise ValueError(f"plain_verify: expected a known rule and fault, got {rule!r}, {fault!r}")
    batch = _Batch.of(target_logits, draft_token_ids, parents, num_nodes, sampling)
    if draft_logits is not None and rule != "coupled":
        scale = 0.7 if fault == "wrong_draft_probabilities" else 1.0
        draft = softmax(draft_logits.to(batch.target.dtype) * scale)
        missing = max(0, batch.vocab - draft.shape[-1])
        batch = batch._replace(draft=torch.nn.functional.pad(draft, (0, missing)))
    numbers = _Numbers(sampling, rule, fault)
    decide = {"coupled": _coupled, "block": _block}.get(rule, _siblings)
    accepted, token = decide(batch, numbers)
    return batch.acceptance(accepted, token)


class _Batch(NamedTuple):
    """target: probabilities [B, T, V]. draft: [B, T, Vd], None for one-hot. depth: [B, T]."""

    target: Tensor
    draft: Tensor | None
    ids: Tensor
    parents: Tensor
    num_nodes: Tensor
    depth: Tensor

    @staticmethod
    def of(
        logits: Tensor, ids: Tensor, parents: Tensor, num_nodes: Tensor, sampling: SamplingParams
    ) -> _Batch:
        batch, width, vocab = logits.shape
        depth = torch.zeros_like(ids)
        path = torch.full((batch, width, width), -1, dtype=ids.dtype, device=ids.device)
        every = torch.arange(batch, device=ids.device)
        for slot in range(1, width):
            parent = parents[:, slot].long().clamp(min=0)
            depth[:, slot] = depth[every, parent] + 1
            path[:, slot] = path[every, parent]
            path[:, slot, slot] = ids[:, slot]
        of_slots = every.repeat_interleave(width)
        flat = processed(logits.flatten(0, 1), sampling.at(of_slots), path.flatten(0, 1))
        target = softmax(flat).view(batch, width, vocab)
        return _Batch(target, None, ids, parents, num_nodes, depth)

    @property
    def vocab(self) -> int:
        return self.target.shape[-1]

    def is_child(self, slot: int, node: Tensor) -> Tensor:
        return (self.parents[:, slot] == node) & (slot < self.num_nodes)

    def drafted(self, slot: int) -> tuple[Tensor, Tensor]:
        """The slot's token, and whether it is one of the vocabulary."""
        inside = (self.ids[:, slot] >= 0) & (self.ids[:, slot] < self.vocab)
        return torch.where(inside, self.ids[:, slot], 0), inside

    def draft_row(self, node: Tensor, slot: int) -> Tensor:
        """Draft probabilities [B, Vd] of the child `slot` of a node."""
        if self.draft is not None:
            return rows_at(self.draft, node)
        token, inside = self.drafted(slot)
        row = torch.zeros_like(self.target[:, 0])
        return row.scatter(1, token.unsqueeze(1), inside.to(row.dtype).unsqueeze(1))

    def acceptance(self, accepted: Tensor, token: Tensor) -> Acceptance:
        """accepted: bool [B, T], the root not counted; token: the recovered or bonus one, [B]."""
        result = empty_acceptance(self.ids)
        live = self.num_nodes > 0
        result.path[live, 0] = 0
        result.num_accepted.copy_(accepted.sum(1) * live)
        for slot in range(1, self.ids.shape[1]):
            rows = (accepted[:, slot] & live).nonzero()[:, 0]
            at = self.depth[rows, slot]
            result.path[rows, at] = slot
            result.output_token_ids[rows, at - 1] = self.ids[rows, slot]
        result.output_token_ids[live, result.num_accepted[live].long()] = token[live]
        return result


def softmax(logits: Tensor) -> Tensor:
    """torch.softmax over the last dimension, quicker for a handful of tokens."""
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def rows_at(table: Tensor, slot: Tensor) -> Tensor:
    """[B, V] of [B, T, V]."""
    return table[torch.arange(len(table), device=table.device), slot]


class _Numbers(NamedTuple):
    """The random numbers of each decision."""

    sampling: SamplingParams
    rule: str
    fault: str | None

    def counter(self, depth: Tensor) -> Tensor:
        if self.rule == "block" and self.fault != "position_keyed_block":
            return self.sampling.step
        return self.sampling.position + depth

    def coin(self, slot: int, depth: Tensor) -> Tensor:
        index = 0 if self.fault == "position_keyed_block" else slot
        counter = self.counter(depth)
        return _random.uniforms(self.sampling.seed, counter, _random.ACCEPT, index + 1)[:, index]

    def accepts(
        self,
        batch: _Batch,
        slot: int,
        node: Tensor,
        coin: Tensor,
        draft: Tensor,
        target: Tensor,
    ) -> Tensor:
        """Whether a child stands against what its rejected siblings left of target and draft."""
        exhausted = (draft == 0).all(1)
        if self.fault == "stale_siblings":
            target, draft = rows_at(batch.target, node), batch.draft_row(node, slot)
        token, inside = batch.drafted(slot)
        drafted, wanted = (x.gather(1, token.unsqueeze(1)).squeeze(1) for x in (draft, target))
        if self.fault == "accepts_on_equality":
            return inside & ~exhausted & (coin * drafted <= wanted)
        return inside & ~exhausted & (coin * drafted < wanted)

    def draw(self, weights: Tensor, depth: Tensor, rows: Tensor, stream: int) -> Tensor:
        """For some rows (bool [B]) a token from weights [B, V]."""
        seed, counter = self.sampling.seed[rows], self.counter(depth)[rows]
        noise = _random.uniforms(seed, counter, stream, weights.shape[1])
        return (weights[rows].log() + _random.to_gumbel(noise).to(weights.dtype)).argmax(-1)

    def draw_last(self, batch: _Batch, node: Tensor, residual: Tensor, tried: Tensor) -> Tensor:
        """The bonus token of `node`; where its children were tried, one from the residual."""
        token, depth = torch.empty_like(node), batch.depth.gather(1, node.unsqueeze(1)).squeeze(1)
        target = rows_at(batch.target, node)
        empty = (residual == 0).all(1, keepdim=True)
        token[~tried] = self.draw(target, depth, ~tried, _random.BONUS)
        residual = torch.where(empty, target, residual)
        token[tried] = self.draw(residual, depth, tried, _random.RESIDUAL)
        return token


def _coupled(batch: _Batch, numbers: _Numbers) -> tuple[Tensor, Tensor]:
    accepted = torch.zeros_like(batch.ids, dtype=torch.bool)
    node = torch.zeros_like(batch.ids[:, 0])
    token = numbers.draw(batch.target[:, 0], node, node == 0, _random.BONUS)
    for slot in range(1, batch.ids.shape[1]):
        accept = batch.is_child(slot, node) & (batch.ids[:, slot] == token)
        accepted[:, slot] = accept
        node = torch.where(accept, slot, node)
        target, depth = batch.target[:, slot], batch.depth[:, slot]
        token[accept] = numbers.draw(target, depth, accept, _random.BONUS)
    return accepted, token


def _siblings(batch: _Batch, numbers: _Numbers) -> tuple[Tensor, Tensor]:
    """One pass over the slots: children stand behind their parent, siblings in draft order."""
    accepted = torch.zeros_like(batch.ids, dtype=torch.bool)
    node = torch.zeros_like(batch.ids[:, 0])
    tried, last_coin = node != 0, torch.zeros_like(batch.target[:, 0, 0])
    target, draft = batch.target[:, 0], batch.draft_row(node, 0)
    for slot in range(1, batch.ids.shape[1]):
        if batch.draft is None:
            draft = batch.draft_row(node, slot)
        tries = batch.is_child(slot, node)
        coin = numbers.coin(slot, batch.depth[:, slot] - 1)
        accept = tries & numbers.accepts(batch, slot, node, coin, draft, target)
        refused = tries & ~accept
        tried = (tried | refused) & ~accept
        residual = normalised((target - draft[:, : batch.vocab]).clamp(min=0))
        target = torch.where(refused.unsqueeze(1), residual, target)
        target = torch.where(accept.unsqueeze(1), batch.target[:, slot], target)
        if batch.draft is not None:
            every = torch.arange(draft.shape[1], device=draft.device)
            rest = normalised(draft * (every != batch.ids[:, slot : slot + 1]))
            draft = torch.where(refused.unsqueeze(1), rest, draft)
            draft = torch.where(accept.unsqueeze(1), batch.draft[:, slot], draft)
        accepted[:, slot], node = accept, torch.where(accept, slot, node)
        last_coin = torch.where(accept, coin, last_coin)
    token = numbers.draw_last(batch, node, target, tried)
    if numbers.fault == "bonus_from_accept_coin":
        sums = rows_at(batch.target, node).cumsum(1)
        inverse = (sums <= last_coin.unsqueeze(1)).sum(1).clamp(max=batch.vocab - 1)
        token = torch.where(tried | (node == 0), token, inverse)
    return accepted, token


def normalised(weights: Tensor) -> Tensor:
    """Rows that sum to 1; empty ones stay."""
    total = weights.sum(1, keepdim=True)
    return torch.where(total > 0, weights / total, 0.0)


def _block(batch: _Batch, numbers: _Numbers) -> tuple[Tensor, Tensor]:
    """Down the chain with the weight w of the draft so far; see the reference's `block`."""
    width = batch.ids.shape[1]
    last = torch.zeros_like(batch.ids[:, 0])
    weight = torch.ones_like(batch.target[:, 0, 0])
    residual, tried = torch.zeros_like(batch.target[:, 0]), last != 0
    for slot in range(width):
        target, parent = batch.target[:, slot], torch.full_like(last, slot)
        inner = slot + 1 < batch.num_nodes
        stands, left = weight, torch.zeros_like(target)
        if slot + 1 < width:
            draft = batch.draft_row(parent, slot + 1)
            left = (weight.unsqueeze(1) * target - draft[:, : batch.vocab]).clamp(min=0)
            mass = left.sum(1)
            stands = torch.where(inner & (weight < 1), mass / (mass + (1 - weight)), weight)
        keeps = (slot < batch.num_nodes) & (weight > 0)
        if slot > 0:
            keeps &= numbers.coin(slot, parent - 1) < stands
        last = torch.where(keeps, slot, last)
        residual = torch.where(keeps.unsqueeze(1), left, residual)
        tried = torch.where(keeps, inner, tried)
        if slot + 1 < width:
            weight = torch.where(inner, _next_weight(batch, slot + 1, weight, target, draft), 0.0)
    chain = torch.arange(width, device=last.device)
    accepted = (chain > 0) & (chain <= last.unsqueeze(1))
    return accepted, numbers.draw_last(batch, last, residual, tried)


def _next_weight(
    batch: _Batch, child: int, weight: Tensor, target: Tensor, draft: Tensor
) -> Tensor:
    """min(w p / q, 1) for the child's token; 0 once the draft has become impossible."""
    token, inside = batch.drafted(child)
    joint = weight * target.gather(1, token.unsqueeze(1)).squeeze(1)
    drafted = draft.gather(1, token.unsqueeze(1)).squeeze(1)
    ratio = torch.where(joint >= drafted, 1.0, joint / drafted)
    return torch.where(inside & (joint > 0), ratio, 0.0)
