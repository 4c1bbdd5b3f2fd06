// Dot products of bf16 pairs, for the sets that have them in hardware. Elsewhere the same sums in
// fp32, so that the emulated build tests the logic of the kernels.
#pragma once

#include "common/vec.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

#if defined(SPECDEC_ISA_avx512_bf16)
constexpr bool kHasPairDots = true;
#else
constexpr bool kHasPairDots = false;
#endif

typedef I32 PairsUnaligned __attribute__((aligned(2), may_alias));  // a row may start anywhere

// kLanes pairs of consecutive elements, one per lane, the first in its low half.
SPECDEC_INLINE U32 load_pairs(const BFloat16* source) {
  const I32 pairs = *(const PairsUnaligned*)source;
  return bit_cast<U32>(pairs);
}
SPECDEC_INLINE F32 first_of_pairs(U32 pairs) { return bit_cast<F32>(pairs << 16); }
SPECDEC_INLINE F32 second_of_pairs(U32 pairs) { return bit_cast<F32>(pairs & 0xffff0000u); }

// Per lane sum + a.second * b.second + a.first * b.first. The hardware takes subnormal inputs and
// results for zero.
SPECDEC_INLINE F32 dot_pairs(F32 sum, U32 a, U32 b) {
#if defined(__AVX512BF16__) && defined(SPECDEC_ISA_avx512_bf16)
  return (F32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  sum = fma(second_of_pairs(a), second_of_pairs(b), sum);
  return fma(first_of_pairs(a), first_of_pairs(b), sum);
#endif
}

// Both rounded to nearest even; subnormals may become zero.
SPECDEC_INLINE U32 make_pairs(F32 first, F32 second) {
#if defined(__AVX512BF16__) && defined(SPECDEC_ISA_avx512_bf16)
  const __m512i low_high = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (U32)_mm512_permutexvar_epi16(order, low_high);
#else
  const U32 low = bit_cast<U32>(first), high = bit_cast<U32>(second);
  const U32 low_quiet = 0x7fc0u | (low >> 16 & 0x8000u);
  const U32 high_quiet = 0x7fc00000u | (high & 0x80000000u);
  const U32 low_even = (low + 0x7fffu + (low >> 16 & 1u)) >> 16;
  const U32 high_even = (high + 0x7fffu + (high >> 16 & 1u)) & 0xffff0000u;
  return ((first != first) ? low_quiet : low_even) | ((second != second) ? high_quiet : high_even);
#endif
}

// Rounded to nearest even; subnormals may become zero.
template <int count>
SPECDEC_INLINE void store_rounded(BFloat16* target, const F32 (&values)[count]) {
#if defined(__AVX512BF16__) && defined(SPECDEC_ISA_avx512_bf16)
  for (int i = 0; i + 2 <= count; i += 2)
    _mm512_storeu_si512(target + i * kLanes,
                        (__m512i)_mm512_cvtne2ps_pbh((__m512)values[i + 1], (__m512)values[i]));
  if (count % 2 != 0)
    _mm256_storeu_si256((__m256i*)(target + (count - 1) * kLanes),
                        (__m256i)_mm512_cvtneps_pbh((__m512)values[count - 1]));
#else
  for (int i = 0; i < count; ++i) store(target + i * kLanes, values[i]);
#endif
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
