"""exp, log and log1p of csrc/common/numerics.h in PyTorch: the same operations, the same bits.

Given float64 they are torch's own functions, for references that compute in double precision.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LOWEST = -87.0
_HIGHEST = float.fromhex("0x1.62e42ep+6")
_LOG2E = float.fromhex("0x1.715476p+0")
_SHIFTER = float.fromhex("0x1.8p+23")
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
_EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    y = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        y = y * x + c
    return y


def exp(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        return x.exp()
    clamped = torch.where(x < _LOWEST, _LOWEST, x)
    clamped = torch.where(clamped > _HIGHEST, _HIGHEST, clamped)
    n = (clamped * _LOG2E + _SHIFTER) - _SHIFTER
    r = clamped - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    y = _polynomial(r, _EXP) * (r * r) + r
    y = y + 1.0
    shift = torch.nan_to_num(n).to(torch.int32) << 23
    y = (y.view(torch.int32) + shift).view(torch.float32)
    y = torch.where(x < _LOWEST, 0.0, y)
    y = torch.where(x > _HIGHEST, math.inf, y)
    return torch.where(x != x, x, y)


def log(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        return x.log()
    bits = x.view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    e = exponent.to(torch.float32)
    square = f * f
    y = _polynomial(f, _LOG) * f * square
    y = y + e * _LN2_LOW
    y = y - 0.5 * square
    y = f + y
    y = y + e * _LN2_HIGH
    y = torch.where(x < torch.finfo(torch.float32).tiny, -math.inf, y)
    y = torch.where(x < 0.0, math.nan, y)
    return torch.where(x <= torch.finfo(torch.float32).max, y, x)


def log1p(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        return x.log1p()
    w = 1.0 + x
    return log(w) + (x - (w - 1.0)) / w
