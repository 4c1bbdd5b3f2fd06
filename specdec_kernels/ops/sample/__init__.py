"""Draws one token per logits row: temperature, top-k, top-p, min-p and the noise in one op."""

from __future__ import annotations

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
    top_k, top_p and min_p apply in that order; ties at their thresholds are kept. A row with NaN
    gives its largest finite logit (or token 0), a row of -infinity token 0.

    Args:
        logits: raw logits [N, V], fp32, bf16 or fp16.
        sampling: one value per row, each [N]; `position` is that of the token drawn.
        stream: "bonus" for the target's tokens, "draft" for those of a drafter.
        backend: reference or cpu; None picks.

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
    return _op(dense_rows(logits), *sampling[:6], STREAMS[stream], backend=backend or "")


def expect_vocabulary(op: str, logits: Tensor) -> None:
    if logits.shape[-1] == 0:
        raise ValueError(f"{op}: expected a vocabulary of at least one token, got none")


def expect_sampling(
    op: str, sampling: SamplingParams, letter: str, sizes: dict[str, int], like: Tensor
) -> None:
    """Checks the fields that the ops read (`step` is for block verification)."""
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)
    for name, value, dtype in zip(sampling._fields[:6], sampling[:6], dtypes, strict=True):
        expect(op, f"sampling.{name}", value, letter, (dtype,), sizes, like)


def dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _cpu(logits, temperature, top_k, top_p, min_p, seed, position, stream) -> Tensor:
    tokens = logits.new_empty(logits.shape[0], dtype=torch.int64)
    params = [x.contiguous() for x in (temperature, top_k, top_p, min_p, seed, position)]
    native.cpu.sample(logits, params, stream, tokens, native.num_threads())
    return tokens


def _fake(logits, temperature, top_k, top_p, min_p, seed, position, stream) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


_op = register(
    "sample",
    "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, "
    "Tensor position, int stream, *, str backend='') -> Tensor",
    {"cpu": _cpu, "reference": reference.sample},
    _fake,
)
