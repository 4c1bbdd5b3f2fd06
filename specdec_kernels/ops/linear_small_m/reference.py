"""The specification of linear_small_m in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_small_m(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(wide) @ weight.to(wide).T
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype)
