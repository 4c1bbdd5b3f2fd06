"""Launches that the gate must refuse: a kernel that spills, one that wants too much shared memory,
and one that does not compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl


@triton.jit
def _product_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    sum = tl.zeros((M, N), tl.float32)
    for _ in range(64):
        a = tl.load(a_ptr + m[:, None] * K + k[None, :])
        b = tl.load(b_ptr + k[:, None] * N + n[None, :])
        sum = tl.dot(a, b, sum)
        a_ptr += M * K
        b_ptr += K * N
    tl.store(out_ptr + m[:, None] * N + n[None, :], sum)


@triton.jit
def _undefined_kernel(out_ptr):
    tl.store(out_ptr, missing)  # noqa: F821


def product(m: int, n: int, k: int, **options: int) -> Callable[[], None]:
    def call() -> None:
        a, out = torch.empty(16, dtype=torch.bfloat16), torch.empty(16)
        _product_kernel[(1,)](a, a, out, M=m, N=n, K=k, enable_fp_fusion=False, **options)

    return call


def spills(every: bool) -> Iterator[Callable]:
    nvidia = triton.runtime.driver.active.get_current_target().backend == "cuda"
    few_registers = {"maxnreg": 32} if nvidia else {"waves_per_eu": 8}
    yield product(64, 64, 16, num_warps=1, num_stages=1, **few_registers)


def too_much_shared_memory(every: bool) -> Iterator[Callable]:
    yield product(128, 128, 128, num_warps=8, num_stages=6)


def does_not_compile(every: bool) -> Iterator[Callable]:
    yield lambda: _undefined_kernel[(1,)](torch.empty(1), enable_fp_fusion=False)


def good(every: bool) -> Iterator[Callable]:
    yield product(32, 32, 32, num_warps=4, num_stages=2)


LAUNCHES = {f.__name__: f for f in (spills, too_much_shared_memory, does_not_compile, good)}
