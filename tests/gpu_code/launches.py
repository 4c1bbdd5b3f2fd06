"""Calls of every op's Triton launcher that make it launch all its kernels.

LAUNCHES: op to a function that returns calls without arguments. The calls of `every=False` are one
of each kernel in the shapes of a common model; those of `every=True` reach every configuration that
the launcher can choose. Nothing is computed, so contents do not matter: alignment and sizes do.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.tree import SamplingParams

Call = Callable[[], Any]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def launcher(op: str) -> Callable:
    folder = op.rstrip("_")
    return getattr(importlib.import_module(f"specdec_kernels.ops.{folder}.triton"), folder)


def int32(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int32)


def int64(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int64)


def commit_kv_(every: bool) -> Iterator[Call]:
    run = launcher("commit_kv_")
    layers, batch, slots = 2, 2, 32
    row = (int32(batch, 16), int32(batch), int32(batch))
    for dtype in DTYPES if every else DTYPES[:1]:
        for heads, dim in ((8, 128), (3, 64), (1, 80), (32, 256), (2, 9)) if every else ((8, 128),):
            dense = [torch.empty(batch, heads, slots, dim, dtype=dtype) for _ in range(layers)]
            yield functools.partial(run, dense, dense, *row)
            paged = [torch.empty(4, 16, heads, dim, dtype=dtype) for _ in range(layers)]
            yield functools.partial(run, paged, paged, *row, int32(batch, 2))


def build_tree(every: bool) -> Iterator[Call]:
    candidates = (int64(2), int64(2, 500), torch.ones(2, 500), int32(2, 500), int32(2))
    for width in (16, 64, 1024) if every else (64,):
        yield functools.partial(launcher("build_tree"), *candidates, width)


def ngram_lookup(every: bool) -> Iterator[Call]:
    run = launcher("ngram_lookup")
    for num_matches, latest in ((1, True), (8, True), (8, False)) if every else ((8, True),):
        for length in (1024, 32768):  # one launch, and one after the other
            yield functools.partial(run, int32(2, length), int32(2), 2, 5, 16, num_matches, latest)


def tree_attention(every: bool) -> Iterator[Call]:
    def call(
        dtype=torch.bfloat16, size=16, heads=(32, 8), dims=(128, 128), page=0, tree=True, **options
    ) -> Call:
        batch, slots = 1, 8192
        q = torch.empty(batch, size, heads[0], dims[0], dtype=dtype)
        cache = (slots // page, page, heads[1]) if page else (batch, heads[1], slots)
        k, v = (torch.empty(*cache, dim, dtype=dtype) for dim in dims)
        words = int64(1, size, (size + 63) // 64) if tree else None
        depth = int32(batch, size) if tree else None
        table = int32(batch, slots // page) if page else None
        row = (int32(batch), int32(batch), words, depth)
        return functools.partial(
            launcher("tree_attention"), q, k, v, *row, block_table=table, **options
        )

    yield call(tree=False)
    yield call(size=64, window=4096, split_size=10**6, page=16)
    yield call(size=64, dtype=torch.float32)
    yield call(size=2, softcap=30.0, sinks=torch.empty(32), heads=(32, 4), page=64)
    if every:
        for dtype in DTYPES:
            for dims in ((64, 64), (80, 80), (96, 96), (192, 128), (256, 256)):
                for size in (1, 8, 16, 32, 64):  # times 4 heads
                    yield call(dtype, size, dims=dims)
            for size in (1, 8, 64):
                for page in (0, 16, 64):
                    yield call(dtype, size, page=page, window=512, softcap=5.0)


def sampling_params(rows: int, vocab: int, width: int | None, edits: bool) -> SamplingParams:
    sampling = SamplingParams.make(rows)
    if not edits:
        return sampling
    words = (rows, *([width] if width else []), (vocab + 31) // 32)
    return sampling._replace(
        token_ids=int64(rows, 100),
        token_bias=torch.ones(rows, 100),
        token_counts=int32(rows, 100),
        repetition_penalty=torch.ones(rows),
        presence_penalty=torch.ones(rows),
        frequency_penalty=torch.ones(rows),
        allowed_tokens=int32(*words),
    )


def verify_greedy(every: bool) -> Iterator[Call]:
    for dtype in DTYPES if every else DTYPES[:1]:
        for vocab in (151936, 50257) if every else (151936,):
            logits = torch.empty(2, 8, vocab, dtype=dtype)
            window = (int64(2, 8), int32(2, 8), int32(2))
            yield functools.partial(launcher("verify_greedy"), logits, *window)


def sample(every: bool) -> Iterator[Call]:
    for dtype in DTYPES if every else DTYPES[:1]:
        for vocab in (151936, 50257) if every else (151936,):
            for edits in (False, True):
                fields = sampling_params(4, vocab, None, edits)
                logits = torch.empty(4, vocab, dtype=dtype)
                yield functools.partial(launcher("sample"), logits, *fields, 2)


def topk_logprobs(every: bool) -> Iterator[Call]:
    for dtype in DTYPES if every else DTYPES[:1]:
        for vocab in (151936, 50257, 1000) if every else (151936,):
            yield functools.partial(
                launcher("topk_logprobs"), torch.empty(4, vocab, dtype=dtype), 10
            )


def rejection_sample(every: bool) -> Iterator[Call]:
    def call(rule: str, draft: int, is_mapped: bool, edits: bool, dtype: torch.dtype) -> Call:
        logits = torch.empty(2, 8, 151936, dtype=dtype)
        window = (int64(2, 8), torch.arange(-1, 7).int().expand(2, -1).contiguous(), int32(2))
        fields = sampling_params(2, 151936, 8, edits)
        draft_logits = torch.empty(2, 8, draft, dtype=dtype) if draft else None
        vocab_map = torch.arange(draft) if is_mapped else None
        options = (draft_logits, vocab_map, rule, 0.09, 0.3)
        return functools.partial(launcher("rejection_sample"), logits, *window, *fields, *options)

    for dtype in DTYPES if every else DTYPES[:1]:
        for edits in (False, True) if every else (False,):
            yield call("coupled", 0, False, edits, dtype)
            yield call("typical", 0, False, edits, dtype)
            for rule in ("recursive", "block"):
                yield call(rule, 0, False, edits, dtype)
                yield call(rule, 151936, False, edits, dtype)
                if every:
                    yield call(rule, 32000, True, edits, dtype)


LAUNCHES: dict[str, Callable[[bool], Iterator[Call]]] = {
    "build_tree": build_tree,
    "commit_kv_": commit_kv_,
    "ngram_lookup": ngram_lookup,
    "rejection_sample": rejection_sample,
    "sample": sample,
    "topk_logprobs": topk_logprobs,
    "tree_attention": tree_attention,
    "verify_greedy": verify_greedy,
}
