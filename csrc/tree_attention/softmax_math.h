// Vector functions of the softmax. Scores are kept in units of log 2, so that exp is a bare exp2.
#pragma once

#include "common/vec.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

// a where a > b, else b, like vmax, but in one instruction where there is one.
SPECDEC_INLINE F32 larger(F32 a, F32 b) {
#if defined(__AVX512F__) && defined(SPECDEC_ISA_avx512)
  return (F32)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#elif defined(__AVX2__) && defined(SPECDEC_ISA_avx2)
  return (F32)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return vmax(a, b);
#endif
}

struct Exp2Parts {
  F32 power;      // 2^n, n the integer nearest to x
  F32 remainder;  // 2^(x - n) - 1, with full relative precision around 0
};

// Minimax polynomial of (2^f - 1) / f on [-0.5, 0.5]; relative error of 2^f below 2.0e-9.
SPECDEC_INLINE Exp2Parts exp2_parts(F32 x) {  // -127 <= x <= 127
  const F32 shifted = x + 0x1.8p23f;
  const F32 f = x - (shifted - 0x1.8p23f);
  F32 poly = broadcast(0x1.41fbbap-13f);
  poly = fma(poly, f, broadcast(0x1.5f3e54p-10f));
  poly = fma(poly, f, broadcast(0x1.3b2d4cp-7f));
  poly = fma(poly, f, broadcast(0x1.c6aee8p-5f));
  poly = fma(poly, f, broadcast(0x1.ebfbdcp-3f));
  poly = fma(poly, f, broadcast(0x1.62e430p-1f));
  return {bit_cast<F32>((bit_cast<I32>(shifted) << 23) + 0x3f800000), poly * f};
}

// 2^x for x <= 0: exactly 1 at 0, 0 below -126.5, NaN for NaN.
SPECDEC_INLINE F32 exp2_nonpositive(F32 x) {
  const Exp2Parts parts = exp2_parts(larger(broadcast(-127.0f), x));
  return fma(parts.power, parts.remainder, parts.power);
}
SPECDEC_INLINE float exp2_nonpositive(float x) { return exp2_nonpositive(broadcast(x))[0]; }

SPECDEC_INLINE F32 tanh(F32 x) {
  x = vmax(broadcast(-10.0f), x);
  x = select(x > 10.0f, broadcast(10.0f), x);
  const Exp2Parts parts = exp2_parts(x * (2 * kLog2E));
  const F32 expm1 = fma(parts.power, parts.remainder, parts.power - 1.0f);
  return expm1 / (expm1 + 2.0f);
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
