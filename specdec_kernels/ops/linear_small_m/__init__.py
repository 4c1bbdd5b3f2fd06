"""The linear layers of decode and verify: few rows of x, the weight streamed once."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels import native
from specdec_kernels.dispatch import register
from specdec_kernels.ops._checks import FLOATS, expect, expect_no_grad
from specdec_kernels.ops.linear_small_m import reference

__all__ = ["linear_small_m"]


def linear_small_m(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """`x @ weight.T + bias`, accumulated in fp32 and rounded once, made for M up to 64.

    On the CPU backend a row of the result is bitwise the same whatever M, the other rows and the
    number of threads are: each output adds its products in one fixed order.

    Args:
        x: [M, K], fp32, bf16 or fp16; any row stride.
        weight: [N, K] of the same dtype, as `torch.nn.Linear` holds it; any row stride.
        bias: [N] of the same dtype, or None.
        backend: reference or cpu; None picks.

    Returns:
        [M, N], contiguous, of the dtype of x.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.
        RuntimeError: an input requires grad while grad is enabled.

    Equivalent to::

        y = x.float() @ weight.float().T
        if bias is not None:
            y = y + bias.float()
        y = y.to(x.dtype)
    """
    if not _plainly_right(x, weight, bias) or torch.is_grad_enabled():
        _check(x, weight, bias)
    return _op(x, weight, bias, backend=backend)


def _plainly_right(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """The usual case, recognised quickly: this op runs for every linear layer of every step."""
    return (
        bias is None
        and isinstance(x, Tensor)
        and isinstance(weight, Tensor)
        and x.dtype is weight.dtype
        and x.dtype in FLOATS
        and x.ndim == weight.ndim == 2
        and x.shape[1] == weight.shape[1]
        and x.device == weight.device
    )


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    op = "linear_small_m"
    sizes: dict[str, int] = {}
    expect(op, "x", x, "M, K", FLOATS, sizes)
    expect(op, "weight", weight, "N, K", (x.dtype,), sizes, x)
    if bias is not None:
        expect(op, "bias", bias, "N", (x.dtype,), sizes, x)
    expect_no_grad(op, x, weight, bias)


def _cpu(x, weight, bias=None):
    y = x.new_empty(x.shape[0], weight.shape[0])
    bias = None if bias is None else bias.contiguous()
    native.cpu.linear_small_m(_dense(x), _dense(weight), bias, y, native.num_threads())
    return y


def _dense(matrix):
    return matrix if matrix.is_contiguous() or matrix.stride(1) == 1 else matrix.contiguous()


def _fake(x, weight, bias=None):
    return x.new_empty((x.shape[0], weight.shape[0]))


_op = register(
    "linear_small_m",
    "(Tensor x, Tensor weight, Tensor? bias=None, *, str backend='') -> Tensor",
    {"cpu": _cpu, "reference": reference.linear_small_m},
    _fake,
)
