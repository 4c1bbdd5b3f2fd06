"""tree_attention against PyTorch's scaled_dot_product_attention with a dense boolean mask.

sdpa_bool gets the query heads as they are (enable_gqa); sdpa_folded the G heads of a group as more
query rows, so that K and V are read once; hf_sdpa is what transformers does with a 4-D mask. All
get their mask for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.harness import Case, Function, Options
from bench.machine import transformers_version
from specdec_kernels.ops import tree_attention
from specdec_kernels.ops.tree_attention import reference
from specdec_kernels.tree import masks_from_parents

HEADS = ((9, 3, 64), (32, 8, 128))  # query heads, K/V heads, head size
SIZES = (1, 4, 8, 16, 33, 64)
CONTEXTS = (50, 1024, 4096)
LONG_CONTEXT = 32768
FLEX_SIZES = (8, 33)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Inputs(NamedTuple):
    q: Tensor  # [B, T, Hq, D], a transposed view as in the models
    k: Tensor
    v: Tensor
    prefix_len: Tensor
    num_nodes: Tensor
    tree_mask: Tensor
    depth: Tensor
    visible: Tensor  # bool [B, 1, T, ctx + T], for the rivals
    visible_folded: Tensor  # bool [B, 1, G T, ctx + T]
    block_mask: Any  # for flex


def make(seed: int, shape: dict[str, Any], flex: bool) -> Inputs:
    batch, size, ctx, dim = (shape[key] for key in ("B", "T", "ctx", "D"))
    heads, kv_heads, dtype = shape["Hq"], shape["Hkv"], DTYPES[shape["dtype"]]
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, size, dim, generator=g).to(dtype)
    k, v = (torch.randn(batch, kv_heads, ctx + size, dim, generator=g).to(dtype) for _ in range(2))
    parents = [
        [-1, *(max(0, i - 1 - int(torch.randint(0, 3, (), generator=g))) for i in range(1, size))]
        for _ in range(batch)
    ]
    words, depth = masks_from_parents(parents, size)
    tree_mask = torch.tensor(words).view(batch, size, -1)
    visible = torch.stack(
        [
            reference.visible_keys(b, ctx, size, size, tree_mask, None, None, q.device)
            for b in range(batch)
        ]
    ).unsqueeze(1)
    return Inputs(
        q.transpose(1, 2),
        k,
        v,
        torch.full((batch,), ctx, dtype=torch.int32),
        torch.full((batch,), size, dtype=torch.int32),
        tree_mask,
        torch.tensor(depth, dtype=torch.int32),
        visible,
        visible.repeat(1, 1, heads // kv_heads, 1),
        block_mask(visible) if flex else None,
    )


def ours(x: Inputs) -> Tensor:
    return tree_attention(*x[:7], scale=x.q.shape[-1] ** -0.5)[0]


def by_reference(x: Inputs) -> Tensor:
    return reference.tree_attention(*x[:7], scale=x.q.shape[-1] ** -0.5)[0]


def sdpa_bool(x: Inputs) -> Tensor:
    q = x.q.transpose(1, 2)
    out = scaled_dot_product_attention(q, x.k, x.v, x.visible, enable_gqa=True)
    return out.transpose(1, 2)


def sdpa_folded(x: Inputs) -> Tensor:
    batch, size, heads, dim = x.q.shape
    q = x.q.transpose(1, 2).reshape(batch, x.k.shape[1], -1, dim)
    out = scaled_dot_product_attention(q, x.k, x.v, x.visible_folded)
    return out.reshape(batch, heads, size, dim).transpose(1, 2)


def hf_sdpa(x: Inputs) -> Tensor:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layer: Any = SimpleNamespace(num_key_value_groups=x.q.shape[2] // x.k.shape[1], is_causal=True)
    scale = x.q.shape[-1] ** -0.5
    return sdpa_attention_forward(layer, x.q.transpose(1, 2), x.k, x.v, x.visible, scaling=scale)[0]


def block_mask(visible: Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible[b, 0, query, key]

    batch, _, size, keys = visible.shape
    return create_block_mask(sees, batch, None, size, keys, device=str(visible.device))


@cache
def compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 1000
    compile_any: Any = torch.compile
    return compile_any(flex_attention)


def flex(x: Inputs) -> Tensor:
    q = x.q.transpose(1, 2)
    out = compiled_flex()(q, x.k, x.v, block_mask=x.block_mask, enable_gqa=True)
    return out.transpose(1, 2)


def close(got: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if got.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def shapes(quick: bool) -> Iterable[dict[str, Any]]:
    heads = HEADS[:1] if quick else HEADS
    for hq, hkv, dim in heads:
        for dtype in DTYPES:
            for ctx in (50, 1024) if quick else CONTEXTS:
                for batch in (1,) if quick else (1, 4):
                    for size in (1, 8, 33) if quick else SIZES:
                        yield shape_of(size, ctx, batch, dtype, hq, hkv, dim)
            # four rows in fp32 would be 1 GB of K and V, and 4 GB repeated
            for batch in () if quick else (1, 4) if dtype == "bf16" else (1,):
                yield shape_of(6, LONG_CONTEXT, batch, dtype, hq, hkv, dim)
    for size in (8, 16, 64) if quick else ():
        yield shape_of(size, 4096, 1, "bf16", *HEADS[1])


def worth_compiling(shape: dict[str, Any]) -> bool:
    """flex_attention compiles for ten seconds or so per shape."""
    return shape["T"] in FLEX_SIZES and shape["B"] == 1 and shape["ctx"] >= 1000


def shape_of(
    size: int, ctx: int, batch: int, dtype: str, hq: int, hkv: int, dim: int
) -> dict[str, Any]:
    return {"T": size, "ctx": ctx, "B": batch, "dtype": dtype, "Hq": hq, "Hkv": hkv, "D": dim}


def cases(options: Options) -> Iterable[Case]:
    rivals: dict[str, Function] = {"sdpa_bool": sdpa_bool, "sdpa_folded": sdpa_folded}
    if transformers_version() is not None:
        rivals["hf_sdpa"] = hf_sdpa
    for shape in shapes(options.quick):
        with_flex = options.flex and worth_compiling(shape)
        yield case_of(shape, rivals | ({"flex": flex} if with_flex else {}), with_flex)


def case_of(shape: dict[str, Any], rivals: dict[str, Function], with_flex: bool = False) -> Case:
    batch, size, keys = shape["B"], shape["T"], shape["ctx"] + shape["T"]
    elements = 2 * shape["Hkv"] * keys + 2 * shape["Hq"] * size
    return Case(
        shape=shape,
        make=partial(make, shape=shape, flex=with_flex),
        run=ours,
        reference=by_reference,
        rivals=rivals,
        bytes=batch * elements * shape["D"] * DTYPES[shape["dtype"]].itemsize,
        flops=4 * batch * shape["Hq"] * size * keys * shape["D"],
        reads=lambda x: [x.k, x.v],
        check=close,
    )
