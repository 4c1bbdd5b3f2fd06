"""The k most likely tokens of each logits row, as log probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels import native
from specdec_kernels.dispatch import register, triton_kernel
from specdec_kernels.ops._checks import FLOATS, expect, expect_no_grad
from specdec_kernels.ops.sample import dense_rows, expect_vocabulary
from specdec_kernels.ops.topk_logprobs import reference

__all__ = ["topk_logprobs"]


def topk_logprobs(
    logits: Tensor, k: int, *, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest logits of each row, largest first, as log probabilities of the whole row.

    Equal logits stand in the order of their ids. The sum of exponentials is one of integers, so the
    results have the same bits on every backend, instruction set and thread count. NaN counts as
    -infinity; when +infinity occurs, the tokens that hold it share the probability. A token of
    log probability -infinity is never listed: its place, like those beyond the vocabulary, holds id
    -1 and -infinity. A row without a finite logit or +infinity has no other places, and lse
    -infinity.

    Args:
        logits: raw logits [N, V], fp32, bf16 or fp16.
        k: tokens per row, at least 1; it may exceed V.
        backend: reference, cpu or triton; None picks.

    Returns:
        logprobs: (logit - max) - (lse - max), fp32 [N, k].
        token_ids: int64 [N, k].
        lse: log of the sum of exponentials of the row, fp32 [N].

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.

    Equivalent to (without ties, NaN and infinities)::

        lse = logits.float().logsumexp(-1)
        logprobs, token_ids = torch.log_softmax(logits.float(), -1).topk(k)
    """
    op = "topk_logprobs"
    expect(op, "logits", logits, "N, V", FLOATS, {})
    expect_vocabulary(op, logits)
    if k < 1:
        raise ValueError(f"{op}: expected k of at least 1, got {k}")
    expect_no_grad(op, logits)
    return _op(dense_rows(logits), k, backend=backend or "")


def _cpu(logits, k):
    outputs = _fake(logits, k)
    native.cpu.topk_logprobs(logits, k, *outputs, native.num_threads())
    return outputs


def _fake(logits, k):
    rows = logits.shape[0]
    return (
        logits.new_empty((rows, k), dtype=torch.float32),
        logits.new_empty((rows, k), dtype=torch.int64),
        logits.new_empty(rows, dtype=torch.float32),
    )


_op = register(
    "topk_logprobs",
    "(Tensor logits, int k, *, str backend='') -> (Tensor, Tensor, Tensor)",
    {
        "cpu": _cpu,
        "reference": reference.topk_logprobs,
        "triton": triton_kernel("topk_logprobs"),
    },
    _fake,
)
