"""The norm before every layer, in one pass: torch's eight operations each cost a cold start."""

from __future__ import annotations

from torch import Tensor

from specdec_kernels import native
from specdec_kernels.dispatch import register, undisturbed
from specdec_kernels.ops._checks import FLOATS, expect, expect_no_grad, wants_grad
from specdec_kernels.ops.rms_norm import reference

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: str | None = None) -> Tensor:
    """`weight * x / sqrt(mean(x ** 2) + eps)` over the last dimension (RMSNorm, arXiv:1910.07467).

    Computed in fp32; the quotient is rounded to the dtype of x before it is multiplied, as Llama
    and its descendants do it. A row of the result does not depend on the others.

    Args:
        x: [..., D], fp32, bf16 or fp16; any strides.
        weight: [D] of the same dtype.
        eps: added to the mean square.
        backend: reference or cpu; None picks.

    Returns:
        [..., D], contiguous, of the dtype of x.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.
        RuntimeError: an input requires grad while grad is enabled.

    Equivalent to::

        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        y = weight * y.to(x.dtype)
    """
    if undisturbed(x, backend) and not wants_grad(x, weight):
        try:
            return native.cpu.rms_norm(x, weight, eps, native.num_threads())
        except (TypeError, ValueError):
            _check(x, weight)  # says it better, or all is well but the strides
    else:
        _check(x, weight)
    return _op(x, weight, eps, backend=backend)


def _check(x: Tensor, weight: Tensor) -> None:
    sizes: dict[str, int] = {}
    leading = "*, " * (x.ndim - 1) if isinstance(x, Tensor) else ""
    expect("rms_norm", "x", x, leading + "D", FLOATS, sizes)
    expect("rms_norm", "weight", weight, "D", (x.dtype,), sizes, x)
    expect_no_grad("rms_norm", x, weight)


def _cpu(x, weight, eps):
    return native.cpu.rms_norm(x.contiguous(), weight.contiguous(), eps, native.num_threads())


def _fake(x, weight, eps):
    return x.new_empty(x.shape)


_op = register(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps, *, str backend='') -> Tensor",
    {"cpu": _cpu, "reference": reference.rms_norm},
    _fake,
)
