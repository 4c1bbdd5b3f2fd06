"""Draws one token per logits row: penalties, filters and the noise in one op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels import native
from specdec_kernels.dispatch import register
from specdec_kernels.ops._checks import FLOATS, expect, expect_no_grad
from specdec_kernels.ops._random import STREAMS
from specdec_kernels.ops.sample import reference
from specdec_kernels.tree import SamplingParams

__all__ = ["sample"]


def sample(
    logits: Tensor,
    sampling: SamplingParams,
    *,
    stream: str = "bonus",
    backend: str | None = None,
) -> Tensor:
    """Draws from the processed distribution of each row; temperature 0 takes the largest logit.

    The draw is an argmax over logits and Gumbel noise that depends only on the row's seed, its
    position and the token id: the same bits on every backend, in every batch, on any thread count.
    Bias, penalties and mask apply first, then the temperature, top_k, top_p and min_p; ties at
    thresholds are kept. A row with NaN gives its largest finite logit (or token 0), a row of
    -infinity token 0.

    Args:
        logits: raw logits [N, V], fp32, bf16 or fp16.
        sampling: one value per row, each [N]; `position` is that of the token drawn, and
            `allowed_tokens` is [N, ceil(V / 32)].
        stream: "bonus" for the target's tokens, "draft" for those of a drafter.
        backend: reference, cpu or cuda; None picks.

    Returns:
        Token ids, int64 [N].

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.

    Equivalent to (in distribution)::

        scores = TopPLogitsWarper(p)(None, TopKLogitsWarper(k)(None, logits / temperature))
        torch.multinomial(torch.softmax(scores, -1), 1)
    """
    op = "sample"
    sizes: dict[str, int] = {}
    expect(op, "logits", logits, "N, V", FLOATS, sizes)
    expect_vocabulary(op, logits)
    expect_sampling(op, sampling, "N", sizes, logits)
    if stream not in STREAMS:
        raise ValueError(f"{op}: expected stream as one of {', '.join(STREAMS)}, got {stream!r}")
    expect_no_grad(op, logits)
    return _op(dense_rows(logits), *sampling, STREAMS[stream], backend=backend or "")


def expect_vocabulary(op: str, logits: Tensor) -> None:
    if logits.shape[-1] == 0:
        raise ValueError(f"{op}: expected a vocabulary of at least one token, got none")


SAMPLING_SCHEMA = (
    "Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, Tensor position, "
    "Tensor step, Tensor? token_ids, Tensor? token_bias, Tensor? token_counts, "
    "Tensor? repetition_penalty, Tensor? presence_penalty, Tensor? frequency_penalty, "
    "Tensor? allowed_tokens"
)
_FIELDS = {
    "temperature": ("{}", torch.float32),
    "top_k": ("{}", torch.int32),
    "top_p": ("{}", torch.float32),
    "min_p": ("{}", torch.float32),
    "seed": ("{}", torch.int64),
    "position": ("{}", torch.int64),
    "step": ("{}", torch.int64),
    "token_ids": ("{}, H", torch.int64),
    "token_bias": ("{}, H", torch.float32),
    "token_counts": ("{}, H", torch.int32),
    "repetition_penalty": ("{}", torch.float32),
    "presence_penalty": ("{}", torch.float32),
    "frequency_penalty": ("{}", torch.float32),
}


def expect_sampling(
    op: str, sampling: SamplingParams, rows: str, sizes: dict[str, int], like: Tensor
) -> None:
    """Checks every field; `rows` is the shape of the logits without the vocabulary."""
    letter = rows.split(",")[0]
    for name, (shape, dtype) in _FIELDS.items():
        value = getattr(sampling, name)
        if value is not None or name in SamplingParams._fields[:7]:
            expect(op, f"sampling.{name}", value, shape.format(letter), (dtype,), sizes, like)
    for name in ("token_bias", "token_counts"):
        if getattr(sampling, name) is not None and sampling.token_ids is None:
            raise ValueError(f"{op}: expected sampling.token_ids with sampling.{name}, got None")
    allowed = sampling.allowed_tokens
    if allowed is not None:
        words = f"{rows}, {(sizes['V'] + 31) // 32}"
        expect(op, "sampling.allowed_tokens", allowed, words, (torch.int32,), sizes, like)


def contiguous_sampling(fields: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What the bindings take."""
    return [None if field is None else field.contiguous() for field in fields]


def dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _cpu(logits, *args) -> Tensor:
    *fields, stream = args
    tokens = logits.new_empty(logits.shape[0], dtype=torch.int64)
    native.cpu.sample(logits, contiguous_sampling(fields), stream, tokens, native.num_threads())
    return tokens


def _cuda(logits, *args) -> Tensor:
    *fields, stream = args
    tokens = logits.new_empty(logits.shape[0], dtype=torch.int64)
    call = (logits, contiguous_sampling(fields), stream, tokens)
    workspace = tokens.new_zeros(native.cuda.sample_workspace(*call))
    native.cuda.sample(*call, workspace, *native.cuda_launch(logits))
    return tokens


def _reference(logits, *args) -> Tensor:
    *fields, stream = args
    return reference.sample(logits, SamplingParams(*fields), stream)


def _fake(logits, *args) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


_op = register(
    "sample",
    f"(Tensor logits, {SAMPLING_SCHEMA}, int stream, *, str backend='') -> Tensor",
    {"cpu": _cpu, "reference": _reference, "cuda": _cuda},
    _fake,
)
