"""ngram_lookup against transformers' PromptLookupCandidateGenerator, row by row."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.harness import Case, Function, Options
from bench.machine import transformers_version
from specdec_kernels.ops import ngram_lookup
from specdec_kernels.ops.ngram_lookup import reference

VOCAB = 49152
MAX_N = 3
K = 10


class Inputs(NamedTuple):
    tokens: Tensor  # int32 [B, S]
    lens: Tensor
    rows: list[Tensor]  # int64 [1, S] each, for the rival


def make(seed: int, shape: dict[str, Any]) -> Inputs:
    """The end of the text occurs nowhere else, once in the middle, or, as frequent words do, all
    over the place."""
    batch, size = shape["B"], shape["S"]
    g = torch.Generator().manual_seed(seed)
    if shape["matches"] == "many":
        tokens = (torch.rand(batch, size, generator=g) ** 4 * 100).int()
    else:
        tokens = torch.randint(MAX_N, VOCAB, (batch, size), generator=g, dtype=torch.int32)
        end = torch.arange(MAX_N, dtype=torch.int32)
        tokens[:, -MAX_N:] = end
        if shape["matches"] == "one":
            middle = size // 2
            tokens[:, middle : middle + MAX_N] = end
    lens = torch.full((batch,), size, dtype=torch.int32)
    return Inputs(tokens, lens, [row.long().unsqueeze(0) for row in tokens])


def settings(latest: bool) -> dict[str, Any]:
    return {"min_n": 1, "max_n": MAX_N, "k": K, "latest": latest}


def ours(x: Inputs, latest: bool) -> Tensor:
    return ngram_lookup(x.tokens, x.lens, **settings(latest))[0][:, 0]


def by_reference(x: Inputs, latest: bool) -> Tensor:
    return reference.ngram_lookup(x.tokens, x.lens, **settings(latest))[0][:, 0]


def prompt_lookup(x: Inputs) -> Tensor:
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    size = x.tokens.shape[1]
    generator = PromptLookupCandidateGenerator(None, K, MAX_N, size + K + 1)
    drafts = torch.full((len(x.rows), K), -1)
    for b, row in enumerate(x.rows):
        found = generator.get_candidates(row)[0][0, size:]
        drafts[b, : len(found)] = found
    return drafts


def cases(options: Options) -> Iterable[Case]:
    rivals: dict[str, Function] = {}
    if transformers_version() is not None:
        rivals["prompt_lookup"] = prompt_lookup
    for matches in ("none", "one", "many"):
        # prompt lookup takes the earliest match; one match is the latest as well
        latest = matches != "many"
        size = 4096 if options.quick else 32768
        shape: dict[str, Any] = {
            "B": 32, "S": size, "dtype": "int32", "matches": matches, "latest": latest
        }  # fmt: skip
        yield Case(
            shape=shape,
            make=partial(make, shape=shape),
            run=partial(ours, latest=latest),
            reference=partial(by_reference, latest=latest),
            rivals=rivals,
            bytes=shape["B"] * size * 4,
            reads=lambda x: [x.tokens],
        )
