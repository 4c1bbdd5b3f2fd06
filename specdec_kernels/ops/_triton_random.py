"""The random numbers of csrc/common/philox.h in Triton, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.ops import _random
from specdec_kernels.ops._triton_numerics import log, log1p

ACCEPT = tl.constexpr(_random.ACCEPT)
RESIDUAL = tl.constexpr(_random.RESIDUAL)
BONUS = tl.constexpr(_random.BONUS)
# The largest value that gumbel() returns is a little smaller.
LARGEST_GUMBEL = tl.constexpr(22.9)


@triton.jit
def philox(seed, position, stream, block):
    """Four words (uint32) for each block index (uint32); seed and position are int64 scalars."""
    c0 = tl.zeros_like(block) + position.to(tl.uint32)
    c1 = tl.zeros_like(block) + (position >> 32).to(tl.uint32)
    c2 = tl.zeros_like(block) + stream
    c3 = block
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = b.to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = a.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def to_uniform(word):
    """(w + 0.5) 2^-32, at most 1 - 2^-24: never 0, never 1."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.where(u > 0.9999999403953552, 0.9999999403953552, u)


@triton.jit
def gumbel(u):
    return -log(-log1p(-u))


@triton.jit
def uniforms(seed, position, stream, first, BLOCK: tl.constexpr):
    """The uniforms of BLOCK consecutive indices from `first` on, which is a multiple of 4."""
    block = first // 4 + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = philox(seed, position, stream, block.to(tl.uint32))
    return to_uniform(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def coin(seed, position, index):
    """The uniform of stream ACCEPT at one index, a scalar."""
    w0, w1, w2, w3 = philox(seed, position, ACCEPT, (index // 4).to(tl.uint32))
    low = tl.where(index % 2 == 0, w0, w1)
    high = tl.where(index % 2 == 0, w2, w3)
    return to_uniform(tl.where(index % 4 < 2, low, high))


@triton.jit
def may_beat(score, u, best):
    """False where score + gumbel(u) cannot exceed best.

    Gumbel(u) < -log(u), and log2(u) is at least the bits of u read as a fixed-point number.
    """
    slack = 1e-3 + 1e-6 * tl.abs(best)
    log2_u = u.to(tl.int32, bitcast=True).to(tl.float32) * 1.1920928955078125e-07 - 127.0
    return log2_u + (best - slack - score) * 1.4426950 <= 0.0
