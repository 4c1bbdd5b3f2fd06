"""The specification of sample, and of what the sampling ops share, in plain PyTorch.

Probabilities are compared as integers, round(exp(l - max) 2^40), so that sums have no order. Given
fp64, masses are fp64 as well, and nothing is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.ops import _numerics, _random
from specdec_kernels.tree import STATUS_EMPTY, STATUS_NAN, LogitEdits, SamplingParams

Uniforms = Callable[[Tensor, Tensor, int, int], Tensor]


class Rows(NamedTuple):
    """Logits rows made ready: each is either decided or to be drawn from.

    logits: processed (temperature, infinities), less their maximum, [N, V].
    kept: the tokens that the filters leave, bool [N, V].
    decided: the row has one possible token (temperature 0, NaN, nothing finite), bool [N].
    greedy: that token, int64 [N]. status: STATUS_ bits, int32 [N].
    """

    logits: Tensor
    kept: Tensor
    decided: Tensor
    greedy: Tensor
    status: Tensor


def in_working_precision(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest id of the largest logit and the status; in a row with NaN the largest finite one."""
    logits = in_working_precision(logits)
    has_nan = logits.isnan().any(-1)
    usable = torch.where(has_nan.unsqueeze(-1), logits.isfinite(), True)
    masked = torch.where(usable, logits, -math.inf)
    empty = (masked == -math.inf).all(-1) & ~has_nan
    status = has_nan * STATUS_NAN + empty * STATUS_EMPTY
    return masked.argmax(-1), status.to(torch.int32)


def prepare(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Rows:
    token, status = greedy(logits)
    logits = in_working_precision(logits)
    is_greedy = ~(temperature > 0)
    divisor = torch.where(is_greedy, 1.0, temperature).clamp(max=torch.finfo(torch.float32).max)
    scaled = logits / divisor.to(logits.dtype).unsqueeze(-1)
    largest = scaled.amax(-1, keepdim=True)
    one_hot = torch.where(scaled == math.inf, 0.0, -math.inf).to(scaled.dtype)
    status = torch.where(largest.squeeze(-1) == -math.inf, STATUS_EMPTY, status).to(torch.int32)
    decided = is_greedy | (status != 0)
    centred = torch.where(largest == math.inf, one_hot, scaled - largest)
    centred = torch.where(decided.unsqueeze(-1), 0.0, centred)
    return Rows(centred, kept_set(centred, top_k, top_p, min_p), decided, token, status)


def edit(logits: Tensor, edits: LogitEdits, row: Tensor, path: Tensor | None = None) -> Tensor:
    """Bias, penalties and mask on logits [N, V].

    row: the index of each logits row into the edits' batch, int64 [N]; `allowed_tokens` is [N, W]
    already. path: drafted tokens that each row has behind the text, int64 [N, P], -1 padded.
    """
    if not edits:
        return logits
    logits = in_working_precision(logits)
    zeros = torch.zeros_like(logits)
    seen, counts = zeros.bool(), zeros.to(torch.int32)
    if edits.token_ids is not None:
        ids, inside = _indices(edits.token_ids[row], logits)
        if edits.token_bias is not None:
            values = torch.where(inside, edits.token_bias[row], 0.0).to(logits.dtype)
            bias = zeros.scatter_add(1, ids, values)
            logits = torch.where(bias == -math.inf, -math.inf, logits + bias)
        if edits.token_counts is not None:
            given = torch.where(inside, edits.token_counts[row], -1)
            counts = counts.scatter_add(1, ids, given.clamp(min=0))
            seen = zeros.scatter_add(1, ids, (given >= 0).to(zeros.dtype)) > 0
    if path is not None:
        ids, inside = _indices(path, logits)
        counts = counts.scatter_add(1, ids, inside.to(torch.int32))
        seen |= counts > 0
    if edits.repetition_penalty is not None:
        penalty = edits.repetition_penalty[row].to(logits.dtype).unsqueeze(-1)
        penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
        logits = torch.where(seen, penalised, logits)
    if edits.frequency_penalty is not None:
        penalty = edits.frequency_penalty[row].to(logits.dtype).unsqueeze(-1)
        logits = torch.where(counts > 0, logits - penalty * counts, logits)
    if edits.presence_penalty is not None:
        penalty = edits.presence_penalty[row].to(logits.dtype).unsqueeze(-1)
        logits = torch.where(counts > 0, logits - penalty, logits)
    if edits.allowed_tokens is not None:
        token = torch.arange(logits.shape[-1], device=logits.device)
        allowed = edits.allowed_tokens[:, token // 32] >> (token % 32) & 1
        logits = torch.where(allowed == 0, -math.inf, logits)
    return logits


def _indices(ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    inside = (ids >= 0) & (ids < logits.shape[-1])
    return torch.where(inside, ids, 0), inside


def mass_bits(vocab: int) -> int:
    """Fixed-point bits of a mass: 40, fewer where the sum of a huge vocabulary could overflow."""
    return min(40, 62 - (vocab - 1).bit_length())


def masses(logits: Tensor, kept: Tensor) -> Tensor:
    """exp(logits) in fixed point, as int64; in fp64 the numbers themselves."""
    return to_mass(torch.where(kept, _numerics.exp(logits), 0.0))


def to_mass(weights: Tensor) -> Tensor:
    if weights.dtype == torch.float64:
        return weights
    return (weights * 2.0 ** mass_bits(weights.shape[-1])).round().to(torch.int64)


def mass_as_float(mass: Tensor, vocab: int) -> Tensor:
    if mass.dtype == torch.float64:
        return mass
    return (mass.double() * 2.0 ** -mass_bits(vocab)).float()


def kept_set(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """top_k, then top_p, then min_p, as transformers orders them; ties at a threshold are kept.

    `logits` [N, V] have maximum 0. top_k keeps the k largest; top_p keeps a token when those above
    it hold less than top_p of the mass; min_p keeps what has min_p times the largest probability.
    """
    vocab = logits.shape[-1]
    ordered, order = logits.sort(-1, descending=True)
    index = (top_k.long().clamp(1, vocab) - 1).unsqueeze(-1)
    kept = (logits >= ordered.gather(-1, index)) | (top_k <= 0).unsqueeze(-1)
    kept &= logits > -math.inf

    mass = masses(logits, kept).gather(-1, order)
    sums = mass.cumsum(-1)
    first_tie = torch.searchsorted((-ordered).contiguous(), (-ordered).contiguous())
    above = (sums - mass).gather(-1, first_tie).double()
    wanted = top_p.double().unsqueeze(-1) * sums[..., -1:].double()
    nucleus = torch.empty_like(kept).scatter_(-1, order, above < wanted)
    kept &= nucleus | ~(top_p < 1).unsqueeze(-1) | (logits == 0)

    floor = _numerics.log(min_p.clamp(max=1.0)).to(logits.dtype).unsqueeze(-1)
    return kept & ((logits >= floor) | ~(min_p > 0).unsqueeze(-1))


def gumbel_argmax(scores: Tensor, uniform: Tensor) -> Tensor:
    """A draw from softmax(scores); -infinity is never drawn unless it is everywhere."""
    return (scores + _random.to_gumbel(uniform).to(scores.dtype)).argmax(-1)


def draw(
    rows: Rows, seed: Tensor, position: Tensor, stream: int, uniforms: Uniforms = _random.uniforms
) -> Tensor:
    noise = uniforms(seed, position, stream, rows.logits.shape[-1])
    drawn = gumbel_argmax(torch.where(rows.kept, rows.logits, -math.inf), noise)
    return torch.where(rows.decided, rows.greedy, drawn)


def sample(
    logits: Tensor,
    sampling: SamplingParams,
    stream: int,
    uniforms: Uniforms = _random.uniforms,
) -> Tensor:
    every = torch.arange(logits.shape[0], device=logits.device)
    rows = prepare(edit(logits, sampling.edits, every), *sampling[:4])
    return draw(rows, sampling.seed, sampling.position, stream, uniforms)
