"""The specification of commit_kv_ in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def commit_kv_(
    k: list[Tensor],
    v: list[Tensor],
    path: Tensor,
    num_kept: Tensor,
    prefix_len: Tensor,
    block_table: Tensor | None = None,
) -> None:
    for b in range(path.shape[0]):
        kept = int(num_kept[b])
        base = int(prefix_len[b])
        slots = [(base + i, base + int(path[b, i])) for i in range(kept) if int(path[b, i]) > i]
        for cache in [*k, *v]:
            for target, source in slots:  # in order: source >= target, so nothing needed is lost
                if block_table is None:
                    cache[b, :, target] = cache[b, :, source].clone()
                else:
                    size = cache.shape[1]
                    to, at = int(block_table[b, target // size]), target % size
                    page, row = int(block_table[b, source // size]), source % size
                    cache[to, at] = cache[page, row].clone()
