"""How every Triton kernel is launched."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: Sequence[int], like: Tensor, *args: Any, **options: Any) -> None:
    """Runs `kernel` on the device and the current stream of `like`; nothing for an empty grid.

    Multiply and add are never fused: sampling must give the same bits on every backend, and
    products that want it fused (tl.dot, tl.fma) say so themselves.
    """
    if 0 in grid:
        return
    on_device = torch.cuda.device(like.device) if like.is_cuda else contextlib.nullcontext()
    with on_device:
        kernel[tuple(grid)](*args, enable_fp_fusion=False, **options)
