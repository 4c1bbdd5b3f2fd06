"""Drafting for a text that is known: what a model that writes it would have accepted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_kernels.drafting import Drafter
from specdec_kernels.metrics import Metrics
from specdec_kernels.tree import Decision, DraftTree


def replay(drafter: Drafter, prompt: Sequence[int], output: Sequence[int], size: int) -> Metrics:
    """The counts of one greedy call that writes `output` and drafts `size` tokens per step.

    drafter: one that needs no hidden states.
    """
    metrics = Metrics(num_new_tokens=1)
    tokens = torch.tensor([[*prompt, *output]], dtype=torch.int32)
    length, end = len(prompt) + 1, tokens.shape[1]
    drafter.begin(tokens[:, :length], _lens(length), None)
    while length < end:
        text, lens, depth = tokens[:, :length], _lens(length), end - length - 1
        most = min(size, depth) if any(drafter.confidence(text, lens)) else 0
        tree = drafter.propose(text, lens, None, [1 + most], [depth])
        path = accepted_path(tree, tokens[0, length : length + depth].tolist())
        slots = torch.full_like(tree.parents, -1)
        slots[0, : len(path)] = torch.tensor(path)
        drafter.commit(Decision(slots, [len(path) - 1], [len(path)]), None)
        length += len(path)
        metrics.num_steps += 1
        metrics.num_new_tokens += len(path)
        metrics.record_row(tree.drafted_depth()[0], len(path) - 1)
    drafter.end(tokens, _lens(end))
    return metrics


def accepted_path(tree: DraftTree, following: Sequence[int]) -> list[int]:
    """The slots of a single row's tree that agree with the tokens behind its root, root first."""
    nodes = int(tree.num_nodes[0])
    parents, tokens = tree.parents[0].tolist(), tree.draft_token_ids[0].tolist()
    children = {(parents[slot], tokens[slot]): slot for slot in range(1, nodes)}
    path = [0]
    for token in following:
        slot = children.get((path[-1], token))
        if slot is None:
            break
        path.append(slot)
    return path


def _lens(length: int) -> torch.Tensor:
    return torch.tensor([length], dtype=torch.int32)
