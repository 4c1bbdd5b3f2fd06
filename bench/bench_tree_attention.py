"""tree_attention against PyTorch's scaled_dot_product_attention with a dense boolean mask.

"sdpa" is given the query heads as they are (enable_gqa), "sdpa folded" the G heads of a group as
more query rows, so that K and V are read once: the honest rival. Both get their mask for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.harness import Case
from specdec_kernels.ops import tree_attention
from specdec_kernels.ops.tree_attention import reference
from specdec_kernels.tree import masks_from_parents

MODELS = {"9/3 heads of 64": (9, 3, 64), "32/8 heads of 128": (32, 8, 128)}


class Inputs(NamedTuple):
    q: Tensor  # [1, T, Hq, D], a transposed view as in the models
    k: Tensor
    v: Tensor
    prefix_len: Tensor
    num_nodes: Tensor
    tree_mask: Tensor
    depth: Tensor
    visible: Tensor  # bool [1, 1, T, ctx + T], for the rivals
    visible_folded: Tensor


def make(
    seed: int, *, heads: int, kv_heads: int, dim: int, ctx: int, size: int, dtype: torch.dtype
) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(1, heads, size, dim, generator=g).to(dtype)
    k, v = (torch.randn(1, kv_heads, ctx + size + 64, dim, generator=g).to(dtype) for _ in "kv")
    parents = [max(-1, i - 1 - int(torch.randint(0, 3, (), generator=g))) for i in range(size)]
    parents = [-1 if i == 0 else max(0, parent) for i, parent in enumerate(parents)]
    words, depth = masks_from_parents([parents], size)
    tree_mask = torch.tensor(words).view(1, size, -1)
    prefix_len, num_nodes = torch.tensor([[ctx], [size]], dtype=torch.int32)
    visible = reference.visible_keys(0, ctx, size, size, tree_mask, None, None, q.device)
    folded = visible.repeat(heads // kv_heads, 1)
    return Inputs(
        q.transpose(1, 2),
        k,
        v,
        prefix_len,
        num_nodes,
        tree_mask,
        torch.tensor(depth, dtype=torch.int32),
        visible[None, None],
        folded[None, None],
    )


def ours(x: Inputs, split_size: int = 0) -> Tensor:
    scale = x.q.shape[-1] ** -0.5
    return tree_attention(*x[:7], scale=scale, split_size=split_size)[0]


def by_reference(x: Inputs) -> Tensor:
    return reference.tree_attention(*x[:7], scale=x.q.shape[-1] ** -0.5)[0]


def sdpa(x: Inputs) -> Tensor:
    end = x.visible.shape[-1]
    out = scaled_dot_product_attention(
        x.q.transpose(1, 2), x.k[:, :, :end], x.v[:, :, :end], x.visible, enable_gqa=True
    )
    return out.transpose(1, 2)


def sdpa_folded(x: Inputs) -> Tensor:
    end = x.visible.shape[-1]
    q = x.q.transpose(1, 2).reshape(1, x.k.shape[1], -1, x.q.shape[-1])
    out = scaled_dot_product_attention(q, x.k[:, :, :end], x.v[:, :, :end], x.visible_folded)
    return out.reshape(1, x.q.shape[2], x.q.shape[1], -1).transpose(1, 2)


def close(got: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if got.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def cases(quick: bool) -> Iterable[Case]:
    shapes = [("9/3 heads of 64", ctx) for ctx in (50, 300, 1000)]
    shapes += [] if quick else [("32/8 heads of 128", 4096)]
    sizes = (1, 8, 32) if quick else (1, 4, 8, 16, 32, 64)
    for model, ctx in shapes:
        heads, kv_heads, dim = MODELS[model]
        for dtype in (torch.float32, torch.bfloat16):
            for size in sizes:
                yield Case(
                    name=f"{model}, {str(dtype).removeprefix('torch.')}, ctx {ctx}, T={size}",
                    make=partial(
                        make, heads=heads, kv_heads=kv_heads, dim=dim, ctx=ctx, size=size,
                        dtype=dtype,
                    ),
                    run=ours,
                    reference=by_reference,
                    rivals={
                        "sdpa folded": sdpa_folded,
                        "sdpa": sdpa,
                        "split_size=256": partial(ours, split_size=256),
                    },
                    bytes=dtype.itemsize * dim * (2 * kv_heads * (ctx + size) + 2 * heads * size),
                    check=close,
                )  # fmt: skip
