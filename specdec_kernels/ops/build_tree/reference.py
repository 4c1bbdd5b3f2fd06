"""The specification of build_tree in plain Python, one row after the other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec_kernels.tree import PADDING_PARENT, ROOT_PARENT, masks_from_parents


def build_tree(
    root_token_ids: Tensor,
    token_ids: Tensor,
    scores: Tensor,
    parents: Tensor,
    max_nodes: Tensor,
    width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, links, counts = [], [], []
    columns = (root_token_ids, token_ids, scores, parents, max_nodes)
    for root, *row, most in zip(*(x.tolist() for x in columns), strict=True):
        size = min(max(most, 0), width)
        slots = best_slots(*distinct(*row), size)
        tokens.append([root] + [token for token, _ in slots] + [root] * (width - 1 - len(slots)))
        links.append([ROOT_PARENT] * (size > 0) + [parent for _, parent in slots])
        counts.append(len(links[-1]))
    words, depth = masks_from_parents(links, width)
    padded = [row + [PADDING_PARENT] * (width - len(row)) for row in links]
    batch, device = len(tokens), token_ids.device
    return (
        torch.tensor(tokens, dtype=torch.int64, device=device).view(batch, width),
        torch.tensor(padded, dtype=torch.int32, device=device).view(batch, width),
        torch.tensor(counts, dtype=torch.int32, device=device),
        torch.tensor(words, dtype=torch.int64, device=device).view(batch, width, -1),
        torch.tensor(depth, dtype=torch.int32, device=device).view(batch, width),
    )


Node = tuple[int, int]  # a parent and a token


def distinct(
    tokens: list[int], scores: list[float], parents: list[int]
) -> tuple[dict[int, Node], dict[int, float]]:
    """The usable candidates, equal ones joined: parent and token, and the best score, by index."""
    node: dict[int, Node] = {}
    best: dict[int, float] = {}
    first: dict[Node, int] = {}
    joined = {-1: -1}  # index of every usable candidate to that of the first one equal to it
    for i, (token, score, parent) in enumerate(zip(tokens, scores, parents, strict=True)):
        if token < 0 or not score > -math.inf or parent not in joined:
            continue
        key = (joined[parent], token)
        joined[i] = j = first.setdefault(key, i)
        node[j] = key
        best[j] = max(score, best.get(j, score))
    return node, best


def best_slots(node: dict[int, Node], best: dict[int, float], size: int) -> list[tuple[int, int]]:
    """Token and parent slot of slots 1 to size - 1, or less when candidates run out."""
    limited = {-1: math.inf}  # no node counts for more than its parent
    for i, (parent, _) in node.items():
        limited[i] = min(best[i], limited[parent])
    order = sorted(node, key=lambda i: (-limited[i], i))[: max(size - 1, 0)]
    slot = {i: at for at, i in enumerate([-1, *order])}
    return [(node[i][1], slot[node[i][0]]) for i in order]
