"""A drafter's step at 128k tokens: 4 new tokens, then a lookup, by index and by reading the text.

One step finds cold caches, as it does behind a forward pass of a model; the first of 32 in a row
warms them for the others.

`prompt_lookup` is transformers' candidate generator. It takes the earliest match where we take the
latest ones, so that only whether it finds one is compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from bench.harness import Case, Options, assert_same
from specdec_kernels import native
from specdec_kernels.ops import ngram_lookup

LENGTH = 128 << 10
STEP = 4
ROOM = 32 << 10  # tokens to come; after them the index is built again, which nobody should time
MIN_N, MAX_N, K, MATCHES = 1, 16, 48, 3  # the n-gram drafter's defaults

Text = Callable[[random.Random, int], list[int]]


def free(rng: random.Random, count: int, vocab: int = 50_000) -> list[int]:
    return rng.choices(range(vocab), k=count)


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
    index: Any
    generator: Any
    steps: int = 0  # that the index took

    def next_lens(self, count: int) -> list[Tensor]:
        if self.steps + count > len(lens_after_steps()):
            self.steps = 0
        self.steps += count
        return lens_after_steps()[self.steps - count : self.steps]


@cache
def lens_after_steps() -> list[Tensor]:
    lens = range(LENGTH + STEP, LENGTH + ROOM + 1, STEP)
    return [torch.tensor([n], dtype=torch.int32) for n in lens]


def make(seed: int, *, text: Text) -> Inputs:
    tokens = torch.tensor([text(random.Random(seed), LENGTH + ROOM)], dtype=torch.int32)
    index = native.cpu.NgramIndex(1, min_n=MIN_N, max_n=MAX_N, k=K, num_matches=MATCHES)
    index.extend(0, tokens[0, :LENGTH])
    return Inputs(tokens, tokens.long(), index, prompt_lookup_generator())


def prompt_lookup_generator() -> Any:
    try:
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
    except ImportError:
        return None
    return PromptLookupCandidateGenerator(
        num_output_tokens=K, max_matching_ngram_size=MAX_N, max_length=2 * (LENGTH + ROOM)
    )


def by_index(x: Inputs, steps: int) -> list[list[int]]:
    for lens in x.next_lens(steps):
        x.index.follow(x.tokens, lens, 1)
        drafts, _ = x.index.lookup()
    return drafts[0]


def by_op(x: Inputs, steps: int, backend: str = "cpu") -> list[list[int]]:
    options: dict[str, Any] = dict(min_n=MIN_N, max_n=MAX_N, k=K, num_matches=MATCHES)
    for lens in lens_after_steps()[:steps]:
        ids, num = ngram_lookup(x.tokens, lens, **options, backend=backend)
        drafts = [d for d, n in zip(ids[0].tolist(), num[0].tolist(), strict=True) if n]
    return drafts


def by_prompt_lookup(x: Inputs) -> bool:
    ids = x.ids[:, : LENGTH + STEP]
    return x.generator.get_candidates(ids)[0].shape[1] > ids.shape[1]


def check(got: Any, expected: list[list[int]]) -> None:
    assert_same(got, bool(expected) if isinstance(got, bool) else expected)


def cases(options: Options) -> Iterable[Case]:
    for name, text in list(TEXTS.items())[: 2 if options.quick else None]:
        for steps in (1, 32):
            rivals: dict[str, Callable[[Inputs], Any]] = {
                "ngram_lookup": partial(by_op, steps=steps)
            }
            if steps == 1 and prompt_lookup_generator() is not None:
                rivals["prompt_lookup"] = by_prompt_lookup
            yield Case(
                shape={"S": LENGTH, "dtype": "int32", "steps": steps, "text": name},
                make=partial(make, text=text),
                run=partial(by_index, steps=steps),
                reference=partial(by_op, steps=steps, backend="reference"),
                rivals=rivals,
                bytes=LENGTH * 4,  # what reading the text once takes
                check=check,
            )
