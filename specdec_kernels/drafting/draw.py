"""Tokens of a drafter's distributions: the best ones, or drawn ones with what they come from."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.ops.rejection_sample import block_position
from specdec_kernels.ops.sample import sample
from specdec_kernels.tree import SamplingParams


def is_sampled(sampling: SamplingParams | None) -> bool:
    """Whether every row is."""
    return sampling is not None and bool((sampling.temperature > 0).all())


def next_tokens(
    logits: Tensor,
    sampling: SamplingParams | None,
    depth: int,
    *,
    drawn: bool,
    rule: str,
    target_ids: Tensor | None = None,
    vocab_size: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Tokens int64 [B] behind drafts of `depth` tokens, and the logits of a draw.

    logits: [B, Vd]. target_ids, vocab_size: the target's id of each draft id, int64 [Vd], and its
        vocabulary; None is equal ids. Tokens are the target's, the logits of a draw are not.
    drawn: under rule "coupled" with the target's own noise, which is no draw of the drafter's.
    """
    if target_ids is None:
        return _next(logits, sampling, depth, drawn, rule)
    if sampling is None or (drawn and rule != "coupled"):
        token, law = _next(logits, sampling, depth, drawn, rule)
        return target_ids[token], law
    return _next(spread(logits, target_ids, vocab_size), sampling, depth, drawn, rule)


def spread(logits: Tensor, target_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits [..., Vd] over the target's vocabulary, -infinity where there is no draft token."""
    if target_ids is None:
        return logits
    whole = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return whole.index_copy_(-1, target_ids, logits)


def _next(
    logits: Tensor, sampling: SamplingParams | None, depth: int, drawn: bool, rule: str
) -> tuple[Tensor, Tensor | None]:
    if sampling is None:
        return logits.argmax(-1), None
    if not drawn:
        best = sampling._replace(temperature=torch.zeros_like(sampling.temperature))
        return sample(logits, best), None
    if rule == "coupled":
        return sample(logits, sampling._replace(position=sampling.position + depth)), None
    law = logits.float() / sampling.temperature[:, None]
    by_step = rule == "block"
    position = block_position(sampling.step, depth) if by_step else sampling.position + depth
    plain = SamplingParams.make(len(law), seed=sampling.seed, position=position, device=law.device)
    return sample(law, plain, stream="draft"), law
