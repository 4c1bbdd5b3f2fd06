"""Verify windows with drafts that are about as good as a good drafter's."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels import ops
from specdec_kernels.tree import Acceptance, SamplingParams

ACCEPTANCE = 0.7  # of a drafted token, about
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SPREAD = 2.0  # standard deviation of the logits
DRAFT_NOISE = 0.77  # on the logits: the target and the draft then share 0.7 of their mass


class Window(NamedTuple):
    """The inputs of verification; every row has the same tree."""

    logits: Tensor  # [B, T, V]
    tokens: Tensor
    parents: Tensor
    num_nodes: Tensor
    sampling: SamplingParams
    draft_logits: Tensor | None
    children: Tensor  # int64 [T, most children], -1 padded; for the rivals


def parents_of(shape: dict[str, Any]) -> list[int]:
    """A chain, or pairs of siblings of which the first has children."""
    if shape.get("rule") != "recursive":
        return list(range(-1, shape["T"] - 1))
    return [-1] + [max(0, 2 * ((slot + 1) // 2 - 1) - 1) for slot in range(1, shape["T"])]


def children_of(parents: list[int]) -> list[list[int]]:
    return [[c for c, p in enumerate(parents) if p == slot] for slot in range(len(parents))]


def sampling_of(shape: dict[str, Any], rows: int, seed: int) -> SamplingParams:
    fields = {key: shape[key] for key in ("temperature", "top_k", "top_p") if key in shape}
    return SamplingParams.make(
        rows, seed=[seed + row for row in range(rows)], position=100, **fields
    )


def make(seed: int, shape: dict[str, Any]) -> Window:
    """The window of a shape with B, T, V, dtype and, for sampling, rule, draft and settings."""
    batch, width, vocab = shape["B"], shape["T"], shape["V"]
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, width, vocab, generator=g).mul_(SPREAD).to(DTYPES[shape["dtype"]])
    parents = parents_of(shape)
    children = children_of(parents)
    sampling = sampling_of(shape, batch, 1000 * seed)
    tokens = torch.zeros(batch, width, dtype=torch.int64)
    draft_logits = None
    if shape.get("draft") == "logits":
        noise = torch.randn(batch, width, vocab, generator=g).mul_(DRAFT_NOISE)
        draft_logits = noise.add_(logits).to(logits.dtype)
        draw_children(tokens, draft_logits, children, sampling.seed)
    elif "rule" in shape:
        tokens[:, 1:] = likely(logits, shape, g)[:, :-1]
    else:
        tokens[:, 1:] = mostly_largest(logits, g)[:, :-1]
    most = max(map(len, children))
    return Window(
        logits,
        tokens,
        torch.tensor(parents, dtype=torch.int32).expand(batch, width).contiguous(),
        torch.full((batch,), width, dtype=torch.int32),
        sampling,
        draft_logits,
        torch.tensor([[*kids, *[-1] * (most - len(kids))] for kids in children]),
    )


def draw_children(
    tokens: Tensor, draft_logits: Tensor, children: list[list[int]], seeds: Tensor
) -> None:
    """Siblings without replacement from the softmax of their parent's draft row."""
    for slot, kids in enumerate(children):
        left = draft_logits[:, slot].clone()
        for i, kid in enumerate(kids):
            sampling = SamplingParams.make(len(left), seed=seeds, position=kid)
            tokens[:, kid] = ops.sample(left, sampling, stream="draft")
            if i + 1 < len(kids):
                left.scatter_(1, tokens[:, kid : kid + 1], -math.inf)


def likely(logits: Tensor, shape: dict[str, Any], g: torch.Generator) -> Tensor:
    """Raises one logit of each row so that its token is drawn with ACCEPTANCE; its ids."""
    temperature, top_k = shape["temperature"], shape.get("top_k", 0)
    tokens = torch.randint(logits.shape[-1], logits.shape[:2], generator=g)
    others = logits.topk(top_k - 1).values if top_k else logits
    rest = (others.float() / temperature).logsumexp(-1)
    share = ACCEPTANCE * shape.get("top_p", 1.0)  # of the mass before top_p
    raised = temperature * (rest + math.log(share / (1 - share)))
    logits.scatter_(-1, tokens.unsqueeze(-1), raised.to(logits.dtype).unsqueeze(-1))
    return tokens


def mostly_largest(logits: Tensor, g: torch.Generator) -> Tensor:
    """The largest logit of each row, or with 1 - ACCEPTANCE another token."""
    wrong = torch.rand(logits.shape[:2], generator=g) >= ACCEPTANCE
    return (logits.max(-1).indices + wrong) % logits.shape[-1]


def logits_bytes(shape: dict[str, Any]) -> int:
    """All rows of target and draft read once: the yardstick of a verification."""
    inner = sum(bool(kids) for kids in children_of(parents_of(shape)))
    rows = shape["B"] * (shape["T"] + (inner if shape.get("draft") == "logits" else 0))
    return rows * shape["V"] * DTYPES[shape["dtype"]].itemsize


def draw_operations(rows: float, vocab: int) -> int:
    """Lane operations of a draw from whole rows, by Gumbel noise.

    Per token: a quarter of ten rounds of Philox (four halves of products, four exclusive ors), nine
    to turn a word into a uniform number, six to see that the token can't win, three on its logit.
    Logarithms are taken where a token may win only, and not counted.
    """
    return round(rows * vocab * (10 * 8 / 4 + 9 + 6 + 3))


def visits(results: list[Acceptance], shape: dict[str, Any]) -> dict[str, Any]:
    """What a kernel reads that stops where the accepted path does, on average over the sets."""
    children = children_of(parents_of(shape))
    path = torch.cat([result.path.flatten() for result in results])
    if shape.get("rule") == "block":
        path = torch.arange(shape["T"]).repeat(shape["B"] * len(results))
    read = [1 + (shape.get("draft") == "logits" and bool(kids)) for kids in children]
    rows = sum(read[slot] for slot in path.tolist() if slot >= 0) / len(results)
    size = shape["V"] * DTYPES[shape["dtype"]].itemsize
    return {
        "accepted": round(torch.cat([r.num_accepted for r in results]).double().mean().item(), 2),
        "rows": logits_bytes(shape) // size,
        "rows_visited": round(rows, 1),
        "visited_bytes": round(rows * size),
    }
