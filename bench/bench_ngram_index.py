"""A drafter's step at 128k tokens: 4 new tokens, then a lookup, by index and by reading the text.

`prompt_lookup` is transformers' candidate generator. It takes the earliest match where we take the
latest ones, so that only whether it finds one is compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.harness import Case, assert_same
from specdec_kernels import native
from specdec_kernels.ops import ngram_lookup

LENGTH = 128 << 10
STEP = 4
ROOM = 32 << 10  # tokens to come; after them the index is built again, which nobody should time
MIN_N, MAX_N, K, MATCHES = 1, 16, 48, 3  # the n-gram drafter's defaults

Text = Callable[[random.Random, int], list[int]]


def free(rng: random.Random, count: int, vocab: int = 50_000) -> list[int]:
    return [rng.randrange(vocab) for _ in range(count)]


def copied(rng: random.Random, count: int) -> list[int]:
    """Passages of up to 60 tokens from before, with new words between."""
    text = free(rng, 2000)
    while len(text) < count:
        start = rng.randrange(len(text) - 60)
        text += text[start : start + rng.randrange(5, 60)] + free(rng, rng.randrange(8))
    return text[:count]


def twice(rng: random.Random, count: int) -> list[int]:
    """A document and its copy."""
    half = free(rng, count // 2)
    return half + half


TEXTS: dict[str, Text] = {
    "random": free,
    "copied passages": copied,
    "a document twice": twice,
    "two tokens at random": lambda rng, count: free(rng, count, 2),
    "two tokens in turn": lambda rng, count: [1, 2] * (count // 2),
    "one token": lambda rng, count: [1] * count,
}


@dataclass
class Inputs:
    tokens: Tensor
    ids: Tensor  # the same in int64
    lens: Tensor
    index: Any  # STEP tokens behind lens
    generator: Any

    def advance(self) -> None:
        length = int(self.lens) + STEP
        self.lens[0] = LENGTH if length > LENGTH + ROOM else length


def make(seed: int, *, text: Text) -> Inputs:
    tokens = torch.tensor([text(random.Random(seed), LENGTH + ROOM)], dtype=torch.int32)
    index = native.cpu.NgramIndex(1, min_n=MIN_N, max_n=MAX_N, k=K, num_matches=MATCHES)
    index.extend(0, tokens[0, :LENGTH])
    lens = torch.tensor([LENGTH + STEP], dtype=torch.int32)
    return Inputs(tokens, tokens.long(), lens, index, prompt_lookup_generator())


def prompt_lookup_generator() -> Any:
    try:
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
    except ImportError:
        return None
    return PromptLookupCandidateGenerator(
        num_output_tokens=K, max_matching_ngram_size=MAX_N, max_length=2 * (LENGTH + ROOM)
    )


def by_index(x: Inputs) -> list[list[int]]:
    x.index.follow(x.tokens, x.lens, 1)
    drafts, _ = x.index.lookup()
    x.advance()
    return drafts[0]


def by_op(x: Inputs, backend: str = "cpu") -> list[list[int]]:
    ids, num = ngram_lookup(
        x.tokens, x.lens, min_n=MIN_N, max_n=MAX_N, k=K, num_matches=MATCHES, backend=backend
    )
    return [draft for draft, n in zip(ids[0].tolist(), num[0].tolist(), strict=True) if n]


def by_prompt_lookup(x: Inputs) -> bool:
    length = int(x.lens)
    ids, _ = x.generator.get_candidates(x.ids[:, :length])
    return ids.shape[1] > length


def check(got: Any, expected: list[list[int]]) -> None:
    assert_same(got, bool(expected) if isinstance(got, bool) else expected)


def cases(quick: bool) -> Iterable[Case]:
    rivals: dict[str, Callable[[Inputs], Any]] = {"ngram_lookup": by_op}
    if prompt_lookup_generator() is not None:
        rivals["prompt_lookup"] = by_prompt_lookup
    for name, text in list(TEXTS.items())[: 2 if quick else None]:
        yield Case(
            name=f"128k tokens, {name}",
            make=partial(make, text=text),
            run=by_index,
            reference=partial(by_op, backend="reference"),
            rivals=rivals,
            bytes=LENGTH * 4,  # what reading the text takes
            check=check,
        )
