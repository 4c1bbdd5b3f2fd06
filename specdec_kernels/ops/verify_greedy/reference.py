"""The specification of verify_greedy in plain PyTorch, and the walk that sampling shares."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.ops.sample.reference import greedy
from specdec_kernels.tree import Acceptance


def verify_greedy(
    logits: Tensor, draft_token_ids: Tensor, parents: Tensor, num_nodes: Tensor
) -> Acceptance:
    valid = valid_slots(num_nodes, logits.shape[1])
    tokens, status = greedy(logits[valid])
    return walk(tokens, status, valid, draft_token_ids, parents)


def valid_slots(num_nodes: Tensor, width: int) -> Tensor:
    return torch.arange(width, device=num_nodes.device) < num_nodes.unsqueeze(-1)


def empty_acceptance(like: Tensor) -> Acceptance:
    """What finished rows get: -1 for slots and tokens, 0 for the count and the status."""
    count = torch.zeros(like.shape[0], dtype=torch.int32, device=like.device)
    path = torch.full(like.shape, -1, dtype=torch.int32, device=like.device)
    return Acceptance(path, count, path.long(), count.clone())


def children(parents: list[int], slot: int, num_nodes: int) -> list[int]:
    return [c for c in range(slot + 1, num_nodes) if parents[c] == slot]


def walk(
    tokens: Tensor, status: Tensor, valid: Tensor, draft_token_ids: Tensor, parents: Tensor
) -> Acceptance:
    """From the root, follows the first child that equals the target token of its parent.

    tokens, status: the target's choice at every valid slot, in the order of `valid` [B, T].
    """
    result = empty_acceptance(draft_token_ids)
    of_slot = torch.zeros_like(draft_token_ids).masked_scatter_(valid, tokens)
    bits = torch.zeros_like(result.path).masked_scatter_(valid, status)
    for b, count in enumerate(valid.sum(-1).tolist()):
        slot: int | None = 0 if count else None
        length = 0
        while slot is not None:
            token = int(of_slot[b, slot])
            result.path[b, length] = slot
            result.output_token_ids[b, length] = token
            result.num_accepted[b] = length
            result.status[b] |= bits[b, slot]
            kids = children(parents[b].tolist(), slot, count)
            slot = next((c for c in kids if int(draft_token_ids[b, c]) == token), None)
            length += 1
    return result
