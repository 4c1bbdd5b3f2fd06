"""What is checked and measured on a GPU, per op: the CPU's cases with rivals that run there, and
attention at the sizes of a server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial

from bench import (
    bench_build_tree,
    bench_commit_kv,
    bench_ngram_lookup,
    bench_rejection_sample,
    bench_sample,
    bench_topk_logprobs,
    bench_tree_attention,
    bench_verify_greedy,
    device_rivals,
)
from bench.harness import Case, Function, Options

HEADS = (32, 8, 128)  # query heads, K/V heads, head size
SMALL_HEADS = (4, 2, 64)
FLEX_CONTEXT, FLEX_SIZES = 4096, (16, 64)  # flex_attention compiles for ten seconds a shape

Cases = Callable[[Options], Iterable[Case]]


def _with(cases: Cases, rivals: Callable[[Case], dict[str, Function]]) -> Cases:
    def replaced(options: Options) -> Iterable[Case]:
        for case in cases(options):
            # What a rival draws is of its own chance; what it computes is held against ours.
            yield dataclasses.replace(case, rivals=rivals(case), facts=None)

    return replaced


def attention_shapes(quick: bool) -> Iterable[tuple[int, int, int]]:
    """B, context, T."""
    sizes = (1, 16, 64) if quick else (1, 6, 16, 64)
    for batch, context in ((1, 4096),) if quick else ((1, 4096), (8, 4096), (32, 4096), (1, 32768)):
        for size in sizes:
            yield batch, context, size


def attention(options: Options) -> Iterable[Case]:
    for batch, context, size in attention_shapes(options.quick):
        flex = options.flex and batch == 1 and context == FLEX_CONTEXT and size in FLEX_SIZES
        yield attention_case(batch, context, size, HEADS, flex)


def attention_case(
    batch: int, context: int, size: int, heads: tuple[int, int, int], flex: bool = False
) -> Case:
    shape = bench_tree_attention.shape_of(size, context, batch, "bf16", *heads)
    return bench_tree_attention.case_of(shape, device_rivals.attention_rivals(flex))


def _lookup(case: Case) -> dict[str, Function]:
    if not case.shape["latest"]:
        return {}
    sizes = {"min_n": 1, "max_n": bench_ngram_lookup.MAX_N, "k": bench_ngram_lookup.K}
    return {"torch_unfold": partial(device_rivals.torch_unfold, **sizes)}


def _own(case: Case) -> dict[str, Function]:
    return case.rivals


MEASURED: dict[str, Cases] = {
    "tree_attention": attention,
    "verify_greedy": _with(bench_verify_greedy.cases, lambda c: device_rivals.greedy_rivals()),
    "rejection_sample": _with(
        bench_rejection_sample.cases, lambda c: device_rivals.rejection_rivals(c.shape)
    ),
    "sample": _with(bench_sample.cases, lambda c: device_rivals.sample_rivals(c.shape)),
    "topk_logprobs": _with(bench_topk_logprobs.cases, _own),
    "build_tree": _with(bench_build_tree.cases, _own),
    "ngram_lookup": _with(bench_ngram_lookup.cases, _lookup),
    "commit_kv_": _with(bench_commit_kv.cases, _own),
}


def checked(op: str) -> Iterable[Case]:
    """The cases whose result, recording and waiting are checked."""
    if op == "tree_attention":
        return [attention_case(2, 300, size, SMALL_HEADS) for size in (1, 7, 64)]
    return MEASURED[op](Options(quick=True))
