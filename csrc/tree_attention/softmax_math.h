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

struct Exp2Argument {
  F32 power;     // 2^n, n the integer nearest to x
  F32 fraction;  // x - n
};

SPECDEC_INLINE Exp2Argument reduce_exp2(F32 x) {  // -127 <= x <= 127
  constexpr float kRound = 0x1.8p23f + 127;       // leaves n + 127, an exponent, in the low bits
  const F32 shifted = x + kRound;
  return {bit_cast<F32>(bit_cast<I32>(shifted) << 23), x - (shifted - kRound)};
}

// Minimax polynomial of (2^f - 1) / f on [-0.5, 0.5]; relative error of 2^f below 2.0e-9.
SPECDEC_INLINE Exp2Parts exp2_parts(F32 x) {
  const auto [power, f] = reduce_exp2(x);
  F32 poly = broadcast(0x1.41fbbap-13f);
  poly = fma(poly, f, broadcast(0x1.5f3e54p-10f));
  poly = fma(poly, f, broadcast(0x1.3b2d4cp-7f));
  poly = fma(poly, f, broadcast(0x1.c6aee8p-5f));
  poly = fma(poly, f, broadcast(0x1.ebfbdcp-3f));
  poly = fma(poly, f, broadcast(0x1.62e430p-1f));
  return {power, poly * f};
}

// 2^x for x <= 0: exactly 1 at 0, 0 below -126.5, NaN for NaN.
SPECDEC_INLINE F32 exp2_nonpositive(F32 x) {
  const Exp2Parts parts = exp2_parts(larger(broadcast(-127.0f), x));
  return fma(parts.power, parts.remainder, parts.power);
}
SPECDEC_INLINE float exp2_nonpositive(float x) { return exp2_nonpositive(broadcast(x))[0]; }

// 2^x of count vectors, step by step, with a relative error of 2.9e-6: for what will be bf16.
// Exactly 1 at 0, 0 for -infinity, NaN for NaN.
template <int count>
SPECDEC_INLINE void short_exp2_nonpositive(F32 (&x)[count]) {
  F32 f[count], poly[count];
#if defined(__AVX512DQ__) && defined(SPECDEC_ISA_avx512_bf16)
  constexpr float kFactors[] = {0x1.b7f734p-7f, 0x1.abf868p-5f, 0x1.ee2452p-3f, 0x1.62d6c6p-1f, 1};
  for (int i = 0; i < count; ++i)  // x - floor(x), and 0 for an infinity
    f[i] = (F32)_mm512_maskz_reduce_ps(0xffff, (__m512)x[i], 9);
#else
  constexpr float kFactors[] = {0x1.3a02ccp-7f, 0x1.c9fc46p-5f, 0x1.ec0378p-3f, 0x1.62e12cp-1f, 1};
  F32 power[count];
  for (int i = 0; i < count; ++i) {
    const auto [two_to_n, fraction] = reduce_exp2(larger(broadcast(-127.0f), x[i]));
    power[i] = two_to_n, f[i] = fraction;
  }
#endif
  for (int i = 0; i < count; ++i) poly[i] = broadcast(kFactors[0]);
  for (int term = 1; term < 5; ++term)
    for (int i = 0; i < count; ++i) poly[i] = fma(poly[i], f[i], broadcast(kFactors[term]));
#if defined(__AVX512DQ__) && defined(SPECDEC_ISA_avx512_bf16)
  for (int i = 0; i < count; ++i)
    x[i] = (F32)_mm512_maskz_scalef_ps(0xffff, (__m512)poly[i], (__m512)x[i]);
#else
  for (int i = 0; i < count; ++i) x[i] = poly[i] * power[i];
#endif
}

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
