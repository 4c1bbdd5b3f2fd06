"""How every Triton kernel is launched, and what its launcher may know of the chip."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

WARPS = 8  # of kernels that read logits

LOG = logging.getLogger("specdec_kernels")


class Chip(NamedTuple):
    """What tile sizes and the number of splits are chosen by.

    backend: "cuda" or "hip". arch: compute capability times ten, 0 on hip. multiprocessors: of the
    whole device. shared_memory: most bytes that one block may take.
    """

    backend: str
    arch: int
    multiprocessors: int
    shared_memory: int


# Stands in for tensors that are on no GPU: under the interpreter any chip would do.
stand_in = Chip("cuda", 90, 132, 232448)


def chip_of(like: Tensor) -> Chip:
    return _device_chip(like.device) if like.is_cuda else stand_in


@functools.cache
def _device_chip(device: torch.device) -> Chip:
    properties = torch.cuda.get_device_properties(device)
    block_memory = properties.shared_memory_per_block
    hip = torch.version.hip is not None
    return Chip(
        "hip" if hip else "cuda",
        0 if hip else 10 * properties.major + properties.minor,
        properties.multi_processor_count,
        getattr(properties, "shared_memory_per_block_optin", block_memory),  # hip has no such
    )


@functools.cache
def _say_once(name: str, device: torch.device) -> None:
    """A first call compiles, which takes seconds; Triton keeps the result on disk."""
    LOG.info("compiling %s for %s unless it is in Triton's cache", name, device)


def launch(kernel: Any, grid: Sequence[int], like: Tensor, *args: Any, **options: Any) -> None:
    """Runs `kernel` on the device and the current stream of `like`; nothing for an empty grid.

    Multiply and add are never fused: sampling must give the same bits on every backend, and
    products that want it fused (tl.dot, tl.fma) say so themselves.
    """
    if 0 in grid:
        return
    if like.is_cuda:
        _say_once(kernel.fn.__name__, like.device)
    on_device = torch.cuda.device(like.device) if like.is_cuda else contextlib.nullcontext()
    with on_device:
        kernel[tuple(grid)](*args, enable_fp_fusion=False, **options)


def launch_large(
    kernel: Any, grid: Sequence[int], like: Tensor, *args: Any, **options: Any
) -> None:
    """Launches a kernel of many registers: left alone, ptxas spills some of them for the sake of an
    occupancy that it aims at."""
    if chip_of(like).backend == "cuda":
        options["maxnreg"] = 255
    launch(kernel, grid, like, *args, **{"num_warps": WARPS, **options})
