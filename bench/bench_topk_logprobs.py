"""topk_logprobs against torch.topk and torch.logsumexp on the raw logits."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bench.harness import Case, Options
from specdec_kernels.ops import topk_logprobs
from specdec_kernels.ops.topk_logprobs import reference

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Inputs(NamedTuple):
    logits: Tensor
    k: int


def make(seed: int, *, rows: int, vocab: int, k: int, dtype: torch.dtype) -> Inputs:
    """The k best logits are distinct in every dtype, so that rivals agree on the ids."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=g) * 2
    best = torch.rand(rows, vocab, generator=g).topk(k).indices
    logits = logits.scatter(1, best, 12 + torch.arange(k).expand(rows, -1) / 8)
    return Inputs(logits.to(dtype), k)


def ours(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    return topk_logprobs(x.logits, x.k)


def by_reference(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    return reference.topk_logprobs(x.logits, x.k)


def torch_topk(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    values, ids = x.logits.topk(x.k)
    lse = x.logits.float().logsumexp(-1)
    return values.float() - lse[:, None], ids, lse


def cases(options: Options) -> Iterable[Case]:
    for dtype_name, dtype in DTYPES.items():
        for vocab in (49152,) if options.quick else (49152, 151936):
            for rows, k in ((1, 10), (10, 10), (8, 64)):
                yield Case(
                    shape={"N": rows, "V": vocab, "k": k, "dtype": dtype_name},
                    make=partial(make, rows=rows, vocab=vocab, k=k, dtype=dtype),
                    run=ours,
                    reference=by_reference,
                    rivals={"torch_batched": torch_topk},
                    bytes=rows * (vocab * dtype.itemsize + 12 * k + 4),
                )
