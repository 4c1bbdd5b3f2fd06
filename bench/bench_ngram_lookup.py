"""ngram_lookup beside a sum of the tokens, which is what reading them takes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bench.harness import Case, assert_same
from specdec_kernels.ops import ngram_lookup

VOCAB = 50_000


class Inputs(NamedTuple):
    tokens: Tensor
    lens: Tensor


def make(seed: int, *, batch: int, length: int, match: bool) -> Inputs:
    """Random rows whose last token occurred before, about every VOCAB tokens, or never."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (batch, length), generator=g, dtype=torch.int32)
    if not match:
        tokens[:, -1] = VOCAB
    return Inputs(tokens, torch.full((batch,), length, dtype=torch.int32))


def run(x: Inputs, backend: str | None = None) -> tuple[Tensor, Tensor]:
    return ngram_lookup(x.tokens, x.lens, min_n=1, max_n=16, k=48, num_matches=3, backend=backend)


def read(x: Inputs) -> None:
    x.tokens.sum(dtype=torch.int32)


def check(got: tuple[Tensor, Tensor] | None, expected: tuple[Tensor, Tensor]) -> None:
    if got is not None:
        assert_same(got, expected)


def cases(quick: bool) -> Iterable[Case]:
    for batch, length in ((32, 32 << 10), (1, 128 << 10))[: 1 if quick else None]:
        for match in (False, True):
            yield Case(
                name=f"B={batch}, S={length}, {'rare matches' if match else 'no match'}",
                make=partial(make, batch=batch, length=length, match=match),
                run=run,
                reference=partial(run, backend="reference"),
                rivals={"sum of the tokens": read},
                bytes=batch * length * 4,
                check=check,
            )
