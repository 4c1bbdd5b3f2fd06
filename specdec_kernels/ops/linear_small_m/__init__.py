"""The linear layers of decode and verify: few rows of x, the weight streamed once."""

from __future__ import annotations

from torch import Tensor

from specdec_kernels import native
from specdec_kernels.dispatch import register, undisturbed
from specdec_kernels.ops._checks import FLOATS, expect, expect_no_grad, wants_grad
from specdec_kernels.ops.linear_small_m import reference

__all__ = ["linear_small_m"]


def linear_small_m(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """`x @ weight.T + bias`, accumulated in fp32 and rounded once, made for M up to 64.

    On the CPU backend a row of the result is bitwise the same whatever M, the other rows and the
    number of threads are: each output adds its products in one fixed order.

    Args:
        x: [..., K], fp32, bf16 or fp16; any strides. M is the product of the leading sizes.
        weight: [N, K] of the same dtype, as `torch.nn.Linear` holds it; any strides.
        bias: [N] of the same dtype, or None.
        backend: reference or cpu; None picks.

    Returns:
        [..., N], contiguous, of the dtype of x.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.
        RuntimeError: an input requires grad while grad is enabled.

    Equivalent to::

        y = x.float() @ weight.float().T
        if bias is not None:
            y = y + bias.float()
        y = y.to(x.dtype)
    """
    if undisturbed(x, backend) and not wants_grad(x, weight, bias):
        try:
            return native.cpu.linear_small_m(x, weight, bias, native.num_threads())
        except (TypeError, ValueError):
            _check(x, weight, bias)  # says it better, or all is well but the strides
    else:
        _check(x, weight, bias)
    return _op(x, weight, bias, backend=backend or "")


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    op = "linear_small_m"
    sizes: dict[str, int] = {}
    leading = "*, " * (x.ndim - 1) if isinstance(x, Tensor) else ""
    expect(op, "x", x, leading + "K", FLOATS, sizes)
    expect(op, "weight", weight, "N, K", (x.dtype,), sizes, x)
    if bias is not None:
        expect(op, "bias", bias, "N", (x.dtype,), sizes, x)
    expect_no_grad(op, x, weight, bias)


def _cpu(x, weight, bias=None):
    rows = x.reshape(-1, x.shape[-1])
    bias = None if bias is None else bias.contiguous()
    y = native.cpu.linear_small_m(_dense(rows), _dense(weight), bias, native.num_threads())
    return y.view(*x.shape[:-1], weight.shape[0])


def _dense(matrix):
    return matrix if matrix.is_contiguous() or matrix.stride(1) == 1 else matrix.contiguous()


def _fake(x, weight, bias=None):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_op = register(
    "linear_small_m",
    "(Tensor x, Tensor weight, Tensor? bias=None, *, str backend='') -> Tensor",
    {"cpu": _cpu, "reference": reference.linear_small_m},
    _fake,
)
