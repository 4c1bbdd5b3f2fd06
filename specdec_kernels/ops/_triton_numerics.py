"""The arithmetic of csrc/common/numerics.h and masses.h in Triton: the same operations, the same
bits, provided that multiply and add are not fused (`launch` sees to that).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Fixed-point masses have 40 bits, with which the sum over this many tokens cannot overflow.
SCALE = tl.constexpr(2.0**40)
LARGEST_VOCABULARY = 1 << 22
# Weights below exp of this have the mass 0 in every vocabulary.
NEGLIGIBLE = tl.constexpr(-29.0)
LOWEST_FLOAT = tl.constexpr(-3.4028234663852886e38)
LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)


@triton.jit
def exp(x):
    """0 below -87, infinity above 88.72, NaN for NaN."""
    clamped = tl.where(x < -87.0, -87.0, x)
    clamped = tl.where(clamped > 88.72283172607422, 88.72283172607422, clamped)
    shifted = clamped * 1.4426950216293335 + 12582912.0  # leaves an integer in the low bits
    n = shifted - 12582912.0
    r = clamped - n * 0.693359375
    r = r - n * -2.12194440e-4
    y = r * 1.9875691500e-4 + 1.3981999507e-3
    y = y * r + 8.3334519073e-3
    y = y * r + 4.1665795894e-2
    y = y * r + 1.6666665459e-1
    y = y * r + 5.0000001201e-1
    y = y * (r * r) + r
    y = y + 1.0
    power = shifted.to(tl.uint32, bitcast=True) << 23
    y = (y.to(tl.uint32, bitcast=True) + power).to(tl.float32, bitcast=True)
    y = tl.where(x < -87.0, 0.0, y)
    y = tl.where(x > 88.72283172607422, float("inf"), y)
    return tl.where(x != x, x, y)


@triton.jit
def log(x):
    """-infinity below the smallest normal number, NaN for x < 0 and for NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    exponent = (bits - 0x3F3504F3).to(tl.int32, bitcast=True) >> 23
    scaled = bits - (exponent << 23).to(tl.uint32, bitcast=True)
    f = scaled.to(tl.float32, bitcast=True) - 1.0
    e = exponent.to(tl.float32)
    square = f * f
    y = f * 7.0376836292e-2 + -1.1514610310e-1
    y = y * f + 1.1676998740e-1
    y = y * f + -1.2420140846e-1
    y = y * f + 1.4249322787e-1
    y = y * f + -1.6668057665e-1
    y = y * f + 2.0000714765e-1
    y = y * f + -2.4999993993e-1
    y = y * f + 3.3333331174e-1
    y = y * f * square
    y = y + e * -2.12194440e-4
    y = y - square * 0.5
    y = f + y
    y = y + e * 0.693359375
    y = tl.where(x < 1.1754943508222875e-38, float("-inf"), y)
    y = tl.where(x < 0.0, float("nan"), y)
    return tl.where(x <= LARGEST_FLOAT, y, x)


@triton.jit
def log1p(x):
    w = x + 1.0
    return log(w) + tl.div_rn(x - (w - 1.0), w)


@triton.jit
def ordered_key(x):
    """int32 that orders as the float does; -0 counts as 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def from_ordered_key(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def pair_key(value, index):
    """int64 that is larger for the larger value, or among equal values for the lower index."""
    low = index.to(tl.int64) ^ 0xFFFFFFFF
    return (ordered_key(value).to(tl.int64) << 32) | low


@triton.jit
def pair_value(key):
    return from_ordered_key((key >> 32).to(tl.int32))


@triton.jit
def pair_index(key):
    return (key & 0xFFFFFFFF) ^ 0xFFFFFFFF


@triton.jit
def to_mass(weight):
    """weight times SCALE as int64, rounded to nearest even."""
    scaled = weight * SCALE
    small = (scaled + 8388608.0) - 8388608.0  # from 2^23 on every float is an integer
    return tl.where(scaled < 8388608.0, small, scaled).to(tl.int64)


@triton.jit
def mass_as_float(mass):
    return (mass.to(tl.float64) * (1.0 / SCALE)).to(tl.float32)
