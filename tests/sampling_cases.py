"""Inputs and statistics that the tests of the sampling ops share."""

from __future__ import annotations

import math

import torch

from specdec_kernels import native
from specdec_kernels.testing import FALSE_ALARM as FALSE_ALARM
from specdec_kernels.testing import chi_square_pvalue as chi_square_pvalue
from specdec_kernels.tree import SamplingParams


def is_slow(backend: str) -> bool:
    """Whether GPU code runs on the CPU here, which takes 10 to 50 ms for each row."""
    return {"triton": native.triton_interprets, "cuda": native.cuda_is_emulated}.get(backend, False)


def rows_for(backend: str, rows: int, few: int) -> int:
    """Rows of a test, few where each takes long."""
    return few if is_slow(backend) else rows


def too_long(backend: str, size: int, dtype: torch.dtype) -> bool:
    """Where rows take long every size is tested in one dtype, neighbours in others."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return is_slow(backend) and dtype != dtypes[size % 3]


def random_window(g: torch.Generator, batch: int, width: int, vocab: int, chain: bool = False):
    """Ragged trees (a finished row among them when batch > 2) with some ids out of range."""
    parents = [
        [-1] + [s - 1 if chain else pick(g, max(0, s - 4), s) for s in range(1, width)]
        for _ in range(batch)
    ]
    num_nodes = torch.randint(1, width + 1, (batch,), generator=g, dtype=torch.int32)
    num_nodes[0] = width
    if batch > 2:
        num_nodes[1] = 0
    ids = torch.randint(-2, vocab + 2, (batch, width), generator=g)
    return ids, torch.tensor(parents, dtype=torch.int32), num_nodes


def pick(g: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high, (1,), generator=g))


def likely_children(g, ids, parents, target, share=0.6):
    """Replaces a share of the drafted ids by the target's choice at their parent."""
    wanted = target.gather(1, parents.clamp(min=0).long())
    return torch.where(torch.rand(ids.shape, generator=g) < share, wanted, ids)


def random_sampling(g: torch.Generator, batch: int, vocab: int) -> SamplingParams:
    """Other settings in every row, all extremes among them."""

    def choose(values, dtype):
        return torch.tensor([values[pick(g, 0, len(values))] for _ in range(batch)], dtype=dtype)

    def wide():
        return torch.randint(-(2**63), 2**63 - 1, (batch,), generator=g)

    return SamplingParams(
        choose([0.0, 1e-4, 0.7, 1.0, 1.0, 100.0, math.inf], torch.float32),
        choose([0, 0, 1, 5, vocab, vocab + 3], torch.int32),
        choose([0.0, 1e-6, 0.5, 0.9, 1.0, 1.0], torch.float32),
        choose([0.0, 0.0, 0.0, 0.1, 1.0], torch.float32),
        wide(),
        wide(),
        torch.zeros(batch, dtype=torch.int64),
    )


def random_edits(g: torch.Generator, sampling: SamplingParams, vocab: int, width: int | None):
    """The same with random optional fields, each present three times out of four."""
    batch, size = len(sampling.seed), pick(g, 0, 2 * min(vocab, 40))
    ids = torch.randint(-1, vocab + 1, (batch, size), generator=g)
    if pick(g, 0, 2):  # the quick form: ascending, distinct
        ids = torch.stack([torch.randperm(vocab, generator=g)[: min(size, vocab)] for _ in ids])
        ids = ids.sort(-1).values
    bias = torch.randn(ids.shape, generator=g) * 2
    bias[torch.rand(ids.shape, generator=g) < 0.2] = -math.inf
    words = (batch, *([width] if width else []), (vocab + 31) // 32)
    allowed = torch.randint(-(2**31), 2**31, words, generator=g).to(torch.int32)

    def penalty(values):
        return torch.tensor([values[pick(g, 0, len(values))] for _ in range(batch)])

    edits = dict(
        token_ids=ids,
        token_bias=bias,
        token_counts=torch.randint(-1, 4, ids.shape, generator=g, dtype=torch.int32),
        repetition_penalty=penalty([1.0, 1.7, 0.6]),
        presence_penalty=penalty([0.0, 0.7, -0.5]),
        frequency_penalty=penalty([0.0, 0.3, -0.2]),
        allowed_tokens=allowed | allowed.roll(1, -1),
    )
    kept = {k: v for k, v in edits.items() if k == "token_ids" or pick(g, 0, 4)}
    return sampling._replace(**kept)


def poison(logits: torch.Tensor, num_nodes: torch.Tensor) -> torch.Tensor:
    """The same logits, not contiguous, with NaN in every padding slot and finished row."""
    batch, width, vocab = logits.shape
    memory = torch.full((batch, width + 1, vocab + 5), math.nan, dtype=logits.dtype)
    used = torch.arange(width) < num_nodes[:, None]
    memory[:, :width, :vocab] = torch.where(used[..., None], logits, math.nan)
    return memory[:, :width, :vocab]
