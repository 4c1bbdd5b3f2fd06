"""The specification of tree_attention in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


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
) -> tuple[Tensor, Tensor]:
    batch, size, q_heads, _ = q.shape
    kv_heads = k.shape[1] if block_table is None else k.shape[2]
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(batch, size, q_heads, v.shape[-1])
    lse = torch.full((batch, q_heads, size), -torch.inf, dtype=compute, device=q.device)
    for b in range(batch):
        nodes = int(num_nodes[b])
        if nodes == 0:
            continue
        prefix = int(prefix_len[b])
        visible = visible_keys(b, prefix, nodes, size, tree_mask, depth, window, q.device)
        used = visible.any(0)  # keys that nobody sees are not read
        table = None if block_table is None else block_table[b]
        keys = _gather(k, b, table, used).to(compute)
        values = _gather(v, b, table, used).to(compute)
        queries = q[b, :nodes].to(compute).unflatten(1, (kv_heads, -1))  # [n, Hkv, G, D]
        scores = torch.einsum("nhgd,hsd->hgns", queries, keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible[:, used], -torch.inf).flatten(0, 1)  # [Hq, n, keys]
        if sinks is not None:
            column = sinks.to(compute)[:, None, None].expand(-1, nodes, 1)
            scores = torch.cat((scores, column), -1)
        total = scores.logsumexp(-1)
        nothing_seen = (total == -torch.inf)[..., None]
        weights = (scores - total[..., None].masked_fill(nothing_seen, 0.0)).exp()
        weights = weights[..., : values.shape[1]].unflatten(0, (kv_heads, -1))
        out[b, :nodes] = torch.einsum("hgns,hsd->nhgd", weights, values).flatten(1, 2).to(q.dtype)
        lse[b, :, :nodes] = total
    return out, lse


def visible_keys(
    b: int,
    prefix: int,
    nodes: int,
    size: int,
    tree_mask: Tensor | None,
    depth: Tensor | None,
    window: int | None,
    device: torch.device,
) -> Tensor:
    """Which of the prefix + nodes keys each node sees, bool [nodes, prefix + nodes]."""
    slots = torch.arange(nodes, device=device)
    if tree_mask is None:
        tree, offsets = slots[None, :] <= slots[:, None], slots
    else:
        words = tree_mask[min(b, tree_mask.shape[0] - 1), :nodes]
        tree = (words[:, slots // 64] >> (slots % 64)) & 1 == 1
        offsets = slots if depth is None else depth[b, :nodes].long()
    visible = torch.cat((tree.new_ones(nodes, prefix), tree), 1)
    if window is not None:
        positions = torch.cat((torch.arange(prefix, device=device), prefix + offsets))
        visible &= (prefix + offsets)[:, None] - positions[None, :] < window
    return visible


def _gather(cache: Tensor, b: int, table: Tensor | None, used: Tensor) -> Tensor:
    """The used slots of row b, [Hkv, slots, D]."""
    slots = used.nonzero().squeeze(1)
    if table is None:
        return cache[b][:, slots]
    page = cache.shape[1]
    return cache[table[slots // page].long(), slots % page].transpose(0, 1)
