"""What a GPU kernel needs to know of all caches."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def device_table(device: torch.device, caches: Sequence[Tensor]) -> Tensor:
    """int64 [9, n] for n caches: addresses, then their four sizes each, then four strides each, the
    last two as [n, 4] in memory. Kept for the next steps: building it copies from the host."""
    return _device_table(
        device,
        tuple(c.data_ptr() for c in caches),
        tuple(tuple(c.shape) for c in caches),
        tuple(c.stride() for c in caches),
    )


@functools.lru_cache(maxsize=8)
def _device_table(device: torch.device, addresses, shapes, strides) -> Tensor:
    numbers = [*addresses, *(n for s in shapes for n in s), *(n for s in strides for n in s)]
    return torch.tensor(numbers, dtype=torch.int64, device=device)
