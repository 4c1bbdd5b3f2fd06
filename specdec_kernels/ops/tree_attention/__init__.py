"""Attention of the verify window: every node sees its row's prefix and its own ancestors."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels import native
from specdec_kernels.dispatch import register, triton_kernel, undisturbed
from specdec_kernels.ops._checks import FLOATS, expect, expect_no_grad, wants_grad
from specdec_kernels.ops.tree_attention import reference
from specdec_kernels.proven import is_proven

__all__ = ["tree_attention"]


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_len: Tensor,
    num_nodes: Tensor,
    tree_mask: Tensor | None = None,
    depth: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    block_table: Tensor | None = None,
    split_size: int = 0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of T drafted slots per row over that row's prefix and their ancestors.

    The window's own K and V already stand at slots prefix_len .. prefix_len + T - 1. Slots at or
    above num_nodes are padding: their K and V are not read, their output is 0 and their lse -inf.

    Args:
        q: queries [B, T, Hq, D]; fp32, bf16 or fp16, any strides with a dense last dimension.
        k, v: caches [B, Hkv, S, D] and [B, Hkv, S, Dv] of q's dtype, any strides with a dense last
            dimension; Hkv divides Hq. With a block table [pages, page, Hkv, D] and [.., Dv].
        prefix_len: committed length of each row, int32 [B].
        num_nodes: slots in use, the root counted, int32 [B]; 0 is a finished row.
        tree_mask: ancestor words, int64 [B or 1, T, >= ceil(T / 64)]; bit j of row i is set when
            slot i sees slot j. None is a causal chain.
        depth: int32 [B, T], needed with tree_mask and window; a chain has depth = slot.
        scale: factor on q k^T.
        window: sliding window in positions: a key is visible when query position - key position <
            window, the position of slot i being prefix_len + depth[i]. None is no window.
        softcap: scores become softcap * tanh(score / softcap) before masking.
        sinks: fp32 [Hq], one more logit per head in the softmax denominator (and in lse).
        block_table: page of each block of a row, int32 [B, M].
        split_size: keys per split of the cache, rounded up to a multiple of 64. A fixed value
            makes the result of a slot bitwise independent of T, batch and threads; 0 picks.
        backend: reference, cpu, triton or cuda; None picks.

    Returns:
        out [B, T, Hq, Dv] of q's dtype and lse fp32 [B, Hq, T] (natural logarithm), contiguous.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.

    Equivalent to (one row b, no window, softcap or sinks)::

        n, p = num_nodes[b], prefix_len[b]
        bits = (tree_mask[b, :n, None, :] >> torch.arange(64)[:, None]) & 1   # [n, 64, words]
        tree = bits.transpose(1, 2).flatten(1)[:, :n].bool()
        mask = torch.cat((torch.ones(n, p, dtype=torch.bool), tree), 1)
        out[b, :n] = F.scaled_dot_product_attention(
            q[b, :n].transpose(0, 1), k[b, :, :p + n], v[b, :, :p + n], mask,
            scale=scale, enable_gqa=True).transpose(0, 1)

    The online softmax is that of FlashAttention (arXiv:2205.14135), split over the cache as in
    Flash-Decoding; the ancestor mask is that of SpecInfer (arXiv:2305.09781).
    """
    arguments = (
        q, k, v, prefix_len, num_nodes, tree_mask, depth, sinks, block_table,
        scale, window, softcap, split_size,
    )  # fmt: skip
    if (
        undisturbed(q, backend)
        and not wants_grad(q, k, v, sinks)
        and split_size >= 0
        and (window is None or window > 0)
        and (softcap is None or softcap > 0)
    ):
        try:
            return _cpu(*arguments)
        except (TypeError, ValueError):
            _check(*arguments)  # says it better
    else:
        _check(*arguments)
    return _op(*arguments, backend=backend or "")


_NAME = "tree_attention"


def _check(
    q, k, v, prefix_len, num_nodes, tree_mask, depth, sinks, block_table,
    scale, window, softcap, split_size,
) -> None:  # fmt: skip
    sizes: dict[str, int] = {}
    expect(_NAME, "q", q, "B, T, Hq, D", FLOATS, sizes)
    cache = "B, Hkv, S, " if block_table is None else "pages, page, Hkv, "
    expect(_NAME, "k", k, cache + "D", (q.dtype,), sizes, q)
    expect(_NAME, "v", v, cache + "Dv", (q.dtype,), sizes, q)
    expect(_NAME, "prefix_len", prefix_len, "B", (torch.int32,), sizes, q)
    expect(_NAME, "num_nodes", num_nodes, "B", (torch.int32,), sizes, q)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"{_NAME}: expected {name} with a dense last dimension, got stride "
                f"{tensor.stride(-1)}"
            )
    if sizes["Hkv"] == 0 or sizes["Hq"] % sizes["Hkv"]:
        raise ValueError(
            f"{_NAME}: expected Hkv to divide Hq, got Hq {sizes['Hq']} and Hkv {sizes['Hkv']}"
        )
    if tree_mask is not None:
        shared = isinstance(tree_mask, Tensor) and tree_mask.ndim == 3 and tree_mask.shape[0] == 1
        shape = "1, T, W" if shared else "B, T, W"
        expect(_NAME, "tree_mask", tree_mask, shape, (torch.int64,), sizes, q)
        if sizes["W"] * 64 < sizes["T"]:
            raise ValueError(
                f"{_NAME}: expected tree_mask with at least {(sizes['T'] + 63) // 64} words for "
                f"T {sizes['T']}, got {sizes['W']}"
            )
    if depth is not None:
        expect(_NAME, "depth", depth, "B, T", (torch.int32,), sizes, q)
    if sinks is not None:
        expect(_NAME, "sinks", sinks, "Hq", (torch.float32,), sizes, q)
    if block_table is not None:
        expect(_NAME, "block_table", block_table, "B, M", (torch.int32,), sizes, q)
    if window is not None:
        if window <= 0:
            raise ValueError(f"{_NAME}: expected window >= 1 or None, got {window}")
        if tree_mask is not None and depth is None:
            raise ValueError(f"{_NAME}: expected depth with tree_mask and window, got None")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{_NAME}: expected softcap > 0 or None, got {softcap}")
    if split_size < 0:
        raise ValueError(f"{_NAME}: expected split_size >= 0, got {split_size}")
    expect_no_grad(_NAME, q, k, v, sinks)


def _cpu(
    q, k, v, prefix_len, num_nodes, tree_mask=None, depth=None, sinks=None, block_table=None,
    scale=1.0, window=None, softcap=None, split_size=0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return native.cpu.tree_attention(
        q, k, v, prefix_len, num_nodes, tree_mask, depth, sinks, block_table,
        scale, softcap or 0.0, window or 0, split_size, native.num_threads(),
    )  # fmt: skip


def _cuda(
    q, k, v, prefix_len, num_nodes, tree_mask=None, depth=None, sinks=None, block_table=None,
    scale=1.0, window=None, softcap=None, split_size=0, hopper=False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The kernel for sm_90a runs where its suite has passed, or with `hopper`."""
    batch, size, q_heads, dim = q.shape
    v_dim = v.shape[-1]
    if max(dim, v_dim) > 256:
        raise ValueError(f"{_NAME}: expected D and Dv of at most 256, got {dim} and {v_dim}")
    if block_table is None:
        kv_heads, slots = k.shape[1:3]
    else:
        kv_heads, slots = k.shape[2], block_table.shape[1] * k.shape[1]
    if not hopper and is_proven(_NAME, "cuda-hopper", q.device):
        hopper = split_size == 0 and _suits_hopper(q, k, v, block_table)
    device, stream = native.cuda_launch(q)
    floats, tickets = native.cuda.tree_attention_workspace(
        q.itemsize, batch, size, q_heads, kv_heads, dim, v_dim, slots, split_size, hopper, device
    )
    out, lse = _fake(q, k, v)
    native.cuda.tree_attention(
        (q, k, v, prefix_len, num_nodes, tree_mask, depth, sinks, block_table),
        out, lse, q.new_empty(floats, dtype=torch.float32),
        q.new_zeros(tickets, dtype=torch.int32),
        scale, softcap or 0.0, window or 0, split_size, hopper, device, stream,
    )  # fmt: skip
    return out, lse


_cuda.paths = ("cuda", "cuda-hopper")  # type: ignore[attr-defined]


def _suits_hopper(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None) -> bool:
    """Its tensor copies want 16-bit elements, rows that start at 16 bytes, and pages of whole tiles
    or of 8, 16 or 32 slots."""
    page = k.shape[1] if block_table is not None else 64
    return (
        q.itemsize == 2
        and (page % 64 == 0 or page in (8, 16, 32))
        and all(
            (x.data_ptr() | x.stride(0) * 2 | x.stride(1) * 2 | x.stride(2) * 2) % 16 == 0
            for x in (k, v)
        )
    )


def _reference(
    q, k, v, prefix_len, num_nodes, tree_mask=None, depth=None, sinks=None, block_table=None,
    scale=1.0, window=None, softcap=None, split_size=0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return reference.tree_attention(
        q, k, v, prefix_len, num_nodes, tree_mask, depth, scale=scale, window=window,
        softcap=softcap, sinks=sinks, block_table=block_table, split_size=split_size,
    )  # fmt: skip


def _fake(q, k, v, *args) -> tuple[Tensor, Tensor]:
    batch, size, heads, _ = q.shape
    out = q.new_empty((batch, size, heads, v.shape[-1]))
    return out, q.new_empty((batch, heads, size), dtype=torch.float32)


_op = register(
    _NAME,
    "(Tensor q, Tensor k, Tensor v, Tensor prefix_len, Tensor num_nodes, Tensor? tree_mask=None, "
    "Tensor? depth=None, Tensor? sinks=None, Tensor? block_table=None, float scale=1.0, "
    "int? window=None, float? softcap=None, int split_size=0, *, str backend='') "
    "-> (Tensor, Tensor)",
    {
        "cpu": _cpu,
        "reference": _reference,
        "triton": triton_kernel("tree_attention"),
        "cuda": _cuda,
    },
    _fake,
)
