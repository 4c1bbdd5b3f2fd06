"""Verification and sampling in PyTorch as quick as we can write it: the rivals of our kernels.

A few rows at a time, so that their probabilities stay in the cache; only rows on the accepted path;
top-k first, so that top-p sorts k values; an inverse distribution function where the whole
vocabulary is drawn from, which takes a seventh of the time of multinomial's exponential race; and
max, which takes a quarter of the time of argmax in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.windows import Window

CHUNK = 4  # rows of the batch
Pick = Callable[[Tensor], Tensor]


class Emitted(NamedTuple):
    """tokens: int64 [B, T], -1 padded. num_accepted: int64 [B]."""

    tokens: Tensor
    num_accepted: Tensor

    @staticmethod
    def empty(like: Tensor) -> Emitted:
        return Emitted(torch.full_like(like, -1), torch.zeros(len(like), dtype=torch.int64))


def weights(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """exp(logits / temperature) up to a factor, fp32, in memory of its own."""
    result = logits.to(torch.float32, copy=True)
    result.sub_(result.amax(-1, keepdim=True))
    return (result if temperature == 1.0 else result.div_(temperature)).exp_()


def draw(mass: Tensor) -> Tensor:
    """A column of each row, with probability proportional to its mass."""
    sums = mass.cumsum(-1)
    wanted = torch.rand(len(mass), 1) * sums[:, -1:]
    index = torch.searchsorted(sums, wanted, right=True).squeeze(1)
    return index.clamp_(max=mass.shape[-1] - 1)


def picker(settings: dict[str, Any]) -> Pick:
    """Draws from logits [N, V] under one setting of temperature, top_k and top_p."""
    temperature = settings.get("temperature", 1.0)
    top_k, top_p = settings.get("top_k", 0), settings.get("top_p", 1.0)

    def pick(logits: Tensor) -> Tensor:
        if not top_k and top_p >= 1.0:
            return draw(weights(logits, temperature))
        values, ids = logits.topk(top_k) if top_k else logits.sort(-1, descending=True)
        mass = weights(values, temperature)
        if top_p < 1.0:
            sums = mass.cumsum(-1)
            mass.masked_fill_(sums - mass >= top_p * sums[:, -1:], 0.0)
        index = torch.multinomial(mass, 1) if top_k else draw(mass).unsqueeze(1)
        return ids.gather(1, index).squeeze(1)

    return pick


def sample(logits: Tensor, settings: dict[str, Any]) -> Tensor:
    pick = picker(settings)
    return torch.cat([pick(rows) for rows in logits.split(CHUNK)])


def largest(logits: Tensor) -> Tensor:
    return logits.max(-1).indices


def chains(window: Window, pick: Pick) -> Emitted:
    """One-hot drafts in a chain: the target's token is picked, and stands if it was drafted."""
    result = Emitted.empty(window.tokens)
    width = window.tokens.shape[1]
    for rows in torch.arange(len(window.tokens)).split(CHUNK):
        for depth in range(width):
            token = pick(window.logits[rows, depth])
            result.tokens[rows, depth] = token
            if depth + 1 == width:
                break
            rows = rows[token == window.tokens[rows, depth + 1]]
            result.num_accepted[rows] += 1
            if not len(rows):
                break
    return result


def trees(window: Window) -> Emitted:
    """Sampled drafts, siblings in turn, each against what the rejected ones left (rules token and
    recursive)."""
    assert window.draft_logits is not None
    result = Emitted.empty(window.tokens)
    for rows in torch.arange(len(window.tokens)).split(CHUNK):
        slot = torch.zeros_like(rows)
        for depth in range(window.tokens.shape[1]):
            target = weights(window.logits[rows, slot])
            kids = window.children[slot]
            child = torch.full_like(slot, -1)
            inner = (kids[:, 0] >= 0).nonzero().squeeze(1)
            if len(inner):
                draft = weights(window.draft_logits[rows[inner], slot[inner]])
                drafted = window.tokens[rows[inner, None], kids[inner]]
                left = target[inner]
                child[inner] = try_siblings(left, draft, kids[inner], drafted)
                target[inner] = left
            stands = child >= 0
            token = window.tokens[rows, child.clamp(min=0)]
            if not bool(stands.all()):
                token[~stands] = draw(target[~stands])
            result.tokens[rows, depth] = token
            rows, slot = rows[stands], child[stands]
            result.num_accepted[rows] += 1
            if not len(rows):
                break
    return result


def try_siblings(target: Tensor, draft: Tensor, kids: Tensor, drafted: Tensor) -> Tensor:
    """The accepted kid of each row or -1; `target` becomes what is left of it."""
    target_total, draft_total = target.sum(-1), draft.sum(-1)
    child = torch.full_like(kids[:, 0], -1)
    for kid, token in zip(kids.T, drafted.T, strict=True):
        undecided = (child < 0) & (kid >= 0)
        index = token.unsqueeze(1)
        likelihood = target.gather(1, index).squeeze(1) / target_total
        proposal = draft.gather(1, index).squeeze(1) / draft_total
        accepted = undecided & (torch.rand(len(kid)) * proposal < likelihood)
        child = torch.where(accepted, kid, child)
        lost = (undecided & ~accepted).nonzero().squeeze(1)
        if len(lost):
            left = target[lost].div_(target_total[lost, None])
            target[lost] = left.sub_(draft[lost].div_(draft_total[lost, None])).clamp_(min=0.0)
            target_total[lost] = target[lost].sum(-1)
            draft[lost, token[lost]] = 0.0
            draft_total[lost] = draft[lost].sum(-1)
    return child


def blocks(window: Window) -> Emitted:
    """Chains accepted as a whole (rule block)."""
    assert window.draft_logits is not None
    result = Emitted.empty(window.tokens)
    last_slot = window.tokens.shape[1] - 1
    for rows in torch.arange(len(window.tokens)).split(CHUNK):
        weight = torch.ones(len(rows))
        last = torch.zeros_like(rows)
        kept: Tensor | None = None
        for slot in range(last_slot + 1):
            target = weights(window.logits[rows, slot])
            target.div_(target.sum(-1, keepdim=True))
            left, stands = target, weight
            if slot < last_slot:
                draft = weights(window.draft_logits[rows, slot])
                draft.div_(draft.sum(-1, keepdim=True))
                left = (weight.unsqueeze(1) * target).sub_(draft).clamp_(min=0.0)
                mass = left.sum(-1)
                stands = torch.where(weight >= 1.0, 1.0, mass / (mass + (1.0 - weight)))
            standing = torch.rand(len(rows)) < stands
            if kept is None:
                kept = left
            else:
                last[standing] = slot
                kept[standing] = left[standing]
            if slot < last_slot:
                token = window.tokens[rows, slot + 1].unsqueeze(1)
                ratio = target.gather(1, token) / draft.gather(1, token)
                weight = (weight * ratio.squeeze(1)).clamp_(max=1.0)
        assert kept is not None
        emit(result, rows, window.tokens, last, draw(kept))
    return result


def emit(result: Emitted, rows: Tensor, drafted: Tensor, last: Tensor, token: Tensor) -> None:
    """Accepted tokens up to slot `last`, then `token`."""
    before = torch.arange(drafted.shape[1] - 1) < last.unsqueeze(1)
    result.tokens[rows, :-1] = torch.where(before, drafted[rows, 1:], -1)
    result.tokens[rows, last] = token
    result.num_accepted[rows] = last


def hf_speculative_sampling(window: Window) -> Emitted:
    """transformers' own function, which takes one chain and fp32 logits, row after row."""
    import inspect

    from transformers.generation.utils import _speculative_sampling

    assert window.draft_logits is not None
    extra: dict[str, Any] = {}
    if "is_done_candidate" in inspect.signature(_speculative_sampling).parameters:
        extra["is_done_candidate"] = False  # transformers 4
    result = Emitted.empty(window.tokens)
    length = window.tokens.shape[1] - 1
    for b in range(len(window.tokens)):
        one = slice(b, b + 1)
        tokens, accepted = _speculative_sampling(
            window.tokens[one, 1:],
            window.draft_logits[one, :length].float(),
            length,
            window.logits[one].float(),
            **extra,
        )
        result.tokens[b, : tokens.shape[1]] = tokens[0]
        result.num_accepted[b] = accepted
    return result
