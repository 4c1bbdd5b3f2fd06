// Vector functions of the softmax. Scores are kept in units of log 2, so that exp is a bare exp2.
#pragma once

#include "common/vec.h"

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SPECDEC_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SPECDEC_SHUFFLE
#define SPECDEC_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, I32{__VA_ARGS__})
#endif

namespace specdec {
namespace SPECDEC_ISA {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

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
  const Exp2Parts parts = exp2_parts(vmax(broadcast(-127.0f), x));
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

// ---- reductions over the lanes of several vectors at once

#if defined(SPECDEC_ISA_avx512)
SPECDEC_INLINE F32 unpack_low(F32 a, F32 b) {
  return SPECDEC_SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
}
SPECDEC_INLINE F32 unpack_high(F32 a, F32 b) {
  return SPECDEC_SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
SPECDEC_INLINE F32 pairs_low(F32 a, F32 b) {
  return SPECDEC_SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
}
SPECDEC_INLINE F32 pairs_high(F32 a, F32 b) {
  return SPECDEC_SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
SPECDEC_INLINE F32 fold_quads(F32 a) {
  a = a + SPECDEC_SHUFFLE(a, a, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  return a + SPECDEC_SHUFFLE(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
}
#elif defined(SPECDEC_ISA_avx2)
SPECDEC_INLINE F32 unpack_low(F32 a, F32 b) {
  return SPECDEC_SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
}
SPECDEC_INLINE F32 unpack_high(F32 a, F32 b) {
  return SPECDEC_SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
}
SPECDEC_INLINE F32 pairs_low(F32 a, F32 b) {
  return SPECDEC_SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
}
SPECDEC_INLINE F32 pairs_high(F32 a, F32 b) {
  return SPECDEC_SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}
SPECDEC_INLINE F32 fold_quads(F32 a) { return a + SPECDEC_SHUFFLE(a, a, 4, 5, 6, 7, 0, 1, 2, 3); }
#else
SPECDEC_INLINE F32 unpack_low(F32 a, F32 b) { return SPECDEC_SHUFFLE(a, b, 0, 4, 1, 5); }
SPECDEC_INLINE F32 unpack_high(F32 a, F32 b) { return SPECDEC_SHUFFLE(a, b, 2, 6, 3, 7); }
SPECDEC_INLINE F32 pairs_low(F32 a, F32 b) { return SPECDEC_SHUFFLE(a, b, 0, 1, 4, 5); }
SPECDEC_INLINE F32 pairs_high(F32 a, F32 b) { return SPECDEC_SHUFFLE(a, b, 2, 3, 6, 7); }
SPECDEC_INLINE F32 fold_quads(F32 a) { return a; }
#endif

// The sums of four vectors, written to sums[0..3]; always added in the same order.
SPECDEC_INLINE void store_sums(float* sums, F32 a, F32 b, F32 c, F32 d) {
  const F32 ab = unpack_low(a, b) + unpack_high(a, b);
  const F32 cd = unpack_low(c, d) + unpack_high(c, d);
  const F32 abcd = fold_quads(pairs_low(ab, cd) + pairs_high(ab, cd));
  std::memcpy(sums, &abcd, 4 * sizeof(float));
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
