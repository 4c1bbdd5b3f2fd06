"""build_tree against the same in torch with one Python loop over the slots, as EAGLE-2 does it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bench.harness import Case, Options
from specdec_kernels.ops import build_tree
from specdec_kernels.ops.build_tree import reference

TOP_K = 10  # children per node, and nodes that are expanded per level
LEVELS = 6


class Inputs(NamedTuple):
    root_token_ids: Tensor
    token_ids: Tensor
    scores: Tensor
    parents: Tensor
    max_nodes: Tensor


def make(seed: int, *, batch: int, width: int) -> Inputs:
    """Candidates of LEVELS levels: the best of each level get TOP_K children."""
    g = torch.Generator().manual_seed(seed)
    frontier = torch.full((batch, 1), -1)
    above, count = torch.zeros(batch, 1), 0
    token_ids, scores, parents = [], [], []
    for _ in range(LEVELS):
        steps = torch.rand(batch, frontier.shape[1], TOP_K, generator=g).log()
        scores.append((above[..., None] + steps).flatten(1))
        parents.append(frontier.repeat_interleave(TOP_K, 1).int())
        siblings = torch.rand(batch, frontier.shape[1], 1000, generator=g).topk(TOP_K).indices
        token_ids.append(siblings.flatten(1))
        above, best = scores[-1].topk(TOP_K)
        frontier = best + count
        count += scores[-1].shape[1]
    root = torch.randint(0, 1000, (batch,), generator=g)
    max_nodes = torch.full((batch,), width, dtype=torch.int32)
    return Inputs(
        root, torch.cat(token_ids, 1), torch.cat(scores, 1), torch.cat(parents, 1), max_nodes
    )


def ours(x: Inputs, *, width: int) -> tuple[Tensor | None, ...]:
    return build_tree(*x[:4], max_nodes=x.max_nodes, width=width)[:5]


def by_reference(x: Inputs, *, width: int) -> tuple[Tensor, ...]:
    return reference.build_tree(*x, width)


def torch_and_loop(x: Inputs, *, width: int) -> tuple[Tensor, ...]:
    (batch, count), device = x.scores.shape, x.scores.device
    kept = x.scores.topk(width - 1).indices
    slot_of = torch.zeros(batch, count + 1, dtype=torch.int32, device=device)
    slots = torch.arange(1, width, dtype=torch.int32, device=device).expand(batch, -1)
    slot_of.scatter_(1, kept + 1, slots)
    links = slot_of.gather(1, x.parents.gather(1, kept).long() + 1)
    parents = torch.nn.functional.pad(links, (1, 0), value=-1)
    token_ids = torch.cat((x.root_token_ids[:, None], x.token_ids.gather(1, kept)), 1)
    ancestors = torch.eye(width, dtype=torch.bool, device=device).repeat(batch, 1, 1)
    rows = torch.arange(batch, device=device)
    for slot in range(1, width):
        ancestors[:, slot] |= ancestors[rows, parents[:, slot].long()]
    words = (ancestors.long() << torch.arange(width, device=device)).sum(-1, keepdim=True)
    depth = ancestors.sum(-1, dtype=torch.int32) - 1
    return token_ids, parents, x.max_nodes.clone(), words, depth


def cases(options: Options) -> Iterable[Case]:
    width = 60
    candidates = TOP_K + (LEVELS - 1) * TOP_K**2
    for batch in (1,) if options.quick else (1, 8):
        yield Case(
            shape={"B": batch, "M": candidates, "T": width, "dtype": "fp32"},
            make=partial(make, batch=batch, width=width),
            run=partial(ours, width=width),
            reference=partial(by_reference, width=width),
            rivals={"torch_batched": partial(torch_and_loop, width=width)},
            bytes=batch * (16 * candidates + 24 * width),
        )
