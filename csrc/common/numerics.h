// exp, log and log1p that give the same bits everywhere: polynomials of separately rounded multiply
// and add (the build turns contraction off), written once for one float and for a vector of them.
// A CUDA file has those of one float.
// specdec_kernels/ops/_numerics.py spells the same operations in PyTorch.
//
// Results never depend on the processor's subnormal mode: a result or argument that would be
// subnormal counts as 0. Coefficients are those of the Cephes library (expf, logf).
#pragma once

#include "common/target.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

template <class F>
struct Lanes;
template <>
struct Lanes<float> {
  using Int = int32_t;
  using Uint = uint32_t;
  static SPECDEC_INLINE float to_float(int32_t value) { return static_cast<float>(value); }
};
#if !defined(SPECDEC_DEVICE)
template <>
struct Lanes<F32> {
  using Int = I32;
  using Uint = U32;
  static SPECDEC_INLINE F32 to_float(I32 value) { return __builtin_convertvector(value, F32); }
};
#endif

template <class F>
SPECDEC_INLINE F splat(float value) {
  return value - F{};
}

// The bits of exp_ for x in [-87, 88.72]; anything elsewhere.
template <class F>
SPECDEC_INLINE F exp_in_range(F x) {
  using U = typename Lanes<F>::Uint;
  constexpr float kShifter = 0x1.8p+23f;  // adding it leaves a rounded integer in the low bits
  const F shifted = x * 0x1.715476p+0f + kShifter;
  const F n = shifted - kShifter;
  F r = x - n * 0.693359375f;  // exact: few bits on both sides
  r = r - n * -2.12194440e-4f;
  F y = splat<F>(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r;
  y = y + 1.0f;
  return bit_cast<F>(bit_cast<U>(y) + (bit_cast<U>(shifted) << 23));  // times 2^n
}

// Within 1 ulp of the true value in [-87, 88.72]; 0 below, infinity above, NaN for NaN.
template <class F>
SPECDEC_INLINE F exp_(F x) {
  constexpr float kLowest = -87.0f, kHighest = 0x1.62e42ep+6f;
  F clamped = x < kLowest ? splat<F>(kLowest) : x;
  clamped = clamped > kHighest ? splat<F>(kHighest) : clamped;
  F y = exp_in_range(clamped);
  y = x < kLowest ? splat<F>(0.0f) : y;
  y = x > kHighest ? splat<F>(__builtin_inff()) : y;
  return x != x ? x : y;
}

// Within 1 ulp; -infinity below the smallest normal number, NaN for x < 0 and for NaN.
template <class F>
SPECDEC_INLINE F log_(F x) {
  using I = typename Lanes<F>::Int;
  using U = typename Lanes<F>::Uint;
  const U bits = bit_cast<U>(x);
  // x = (1 + f) 2^e with 1 + f in [sqrt(1/2), sqrt(2))
  const I exponent = bit_cast<I>(bits - 0x3f3504f3u) >> 23;
  const F f = bit_cast<F>(bits - (bit_cast<U>(exponent) << 23)) - 1.0f;
  const F e = Lanes<F>::to_float(exponent);
  const F square = f * f;
  F y = splat<F>(7.0376836292e-2f);
  y = y * f + -1.1514610310e-1f;
  y = y * f + 1.1676998740e-1f;
  y = y * f + -1.2420140846e-1f;
  y = y * f + 1.4249322787e-1f;
  y = y * f + -1.6668057665e-1f;
  y = y * f + 2.0000714765e-1f;
  y = y * f + -2.4999993993e-1f;
  y = y * f + 3.3333331174e-1f;
  y = y * f * square;
  y = y + e * -2.12194440e-4f;
  y = y - 0.5f * square;
  y = f + y;
  y = y + e * 0.693359375f;
  y = x < 0x1p-126f ? splat<F>(-__builtin_inff()) : y;
  y = x < 0.0f ? splat<F>(__builtin_nanf("")) : y;
  return x <= 0x1.fffffep+127f ? y : x;
}

// Within 2 ulp for -1 < x, finite.
template <class F>
SPECDEC_INLINE F log1p_(F x) {
  const F w = 1.0f + x;
  return log_(w) + (x - (w - 1.0f)) / w;  // the second term is what rounding took from w
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
