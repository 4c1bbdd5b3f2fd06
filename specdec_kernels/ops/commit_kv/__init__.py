"""Moves the K and V rows of the accepted path into place, all layers in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels import native
from specdec_kernels.dispatch import register, triton_kernel
from specdec_kernels.ops._checks import FLOATS, expect, expect_no_grad
from specdec_kernels.ops.commit_kv import reference
from specdec_kernels.ops.commit_kv.table import device_table

__all__ = ["commit_kv_"]


def commit_kv_(
    k: list[Tensor],
    v: list[Tensor],
    path: Tensor,
    num_kept: Tensor,
    prefix_len: Tensor,
    block_table: Tensor | None = None,
    *,
    backend: str | None = None,
) -> None:
    """Slot `prefix_len + i` receives slot `prefix_len + path[i]`, for i < num_kept, in place.

    Slots are topologically sorted, so `path[b, i] >= i` and an in-order copy is safe.

    Args:
        k, v: one tensor per layer, [B, Hkv, S, D] each (or [pages, page, Hkv, D] with a block
            table); any strides with a dense last dimension; one dtype for all.
        path: accepted slots of each row, root first, padded with -1, int32 [B, T].
        num_kept: how many entries of `path` to commit, int32 [B]; 0 leaves a row alone.
        prefix_len: committed length before this step, int32 [B].
        block_table: page of each block of a row, int32 [B, M].
        backend: reference, cpu, triton or cuda; None picks.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.

    Equivalent to::

        for cache in k + v:
            for b in range(B):
                kept = prefix_len[b] + path[b, :num_kept[b]]
                cache[b, :, prefix_len[b] : prefix_len[b] + num_kept[b]] = cache[b, :, kept]
    """
    op = "commit_kv_"
    if len(k) != len(v) or not k:
        raise ValueError(f"{op}: expected as many k as v and at least one, got {len(k)}, {len(v)}")
    sizes: dict[str, int] = {}
    expect(op, "path", path, "B, T", (torch.int32,), sizes, k[0])
    expect(op, "num_kept", num_kept, "B", (torch.int32,), sizes, k[0])
    expect(op, "prefix_len", prefix_len, "B", (torch.int32,), sizes, k[0])
    shape = "B, *, *, *" if block_table is None else "*, *, *, *"
    for name, caches in (("k", k), ("v", v)):
        for layer, cache in enumerate(caches):
            expect(op, f"{name}[{layer}]", cache, shape, FLOATS, sizes, k[0])
            if cache.dtype != k[0].dtype:
                raise TypeError(f"{op}: expected one dtype, got {k[0].dtype} and {cache.dtype}")
    if block_table is not None:
        expect(op, "block_table", block_table, "B, *", (torch.int32,), sizes, k[0])
    expect_no_grad(op, *k, *v)
    _op(k, v, path, num_kept, prefix_len, block_table, backend=backend or "")


def _cpu(k, v, path, num_kept, prefix_len, block_table=None) -> None:
    native.cpu.commit_kv(
        [*k, *v],
        path,
        num_kept.contiguous(),
        prefix_len.contiguous(),
        block_table,
        native.num_threads(),
    )


def _cuda(k, v, path, num_kept, prefix_len, block_table=None) -> None:
    native.cuda.commit_kv(
        device_table(path.device, [*k, *v]),
        k[0].element_size(),
        path,
        num_kept.contiguous(),
        prefix_len.contiguous(),
        block_table,
        *native.cuda_launch(path),
    )


def _fake(k, v, path, num_kept, prefix_len, block_table=None) -> None:
    return None


_op = register(
    "commit_kv_",
    "(Tensor(a!)[] k, Tensor(b!)[] v, Tensor path, Tensor num_kept, Tensor prefix_len, "
    "Tensor? block_table=None, *, str backend='') -> ()",
    # the reference comes first on a GPU until the tests of the others have run on a device
    {
        "cpu": _cpu,
        "reference": reference.commit_kv_,
        "triton": triton_kernel("commit_kv"),
        "cuda": _cuda,
    },
    _fake,
)
