// What the two matrix products of attention read: 32-bit items, each one fp32 value or, where the
// CPU has dot products of bf16 pairs, two neighbouring bf16 values.
#pragma once

#include "common/bf16_dot.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

typedef uint32_t Item __attribute__((may_alias, aligned(2)));  // a row may start anywhere
typedef U32 ItemsUnaligned __attribute__((may_alias, aligned(2)));

SPECDEC_INLINE U32 load_items(const Item* source) { return *(const ItemsUnaligned*)source; }
SPECDEC_INLINE void store_items(Item* target, U32 value) { *(ItemsUnaligned*)target = value; }
SPECDEC_INLINE U32 broadcast_item(const Item* source) { return *source - U32{}; }

struct Floats {
  typedef float Element;
  static constexpr int kElements = 1;  // of an item
  static SPECDEC_INLINE F32 add_product(F32 sum, U32 a, U32 b) {
    return fma(bit_cast<F32>(a), bit_cast<F32>(b), sum);
  }
};

struct Pairs {
  typedef BFloat16 Element;
  static constexpr int kElements = 2;
  static SPECDEC_INLINE F32 add_product(F32 sum, U32 a, U32 b) { return dot_pairs(sum, a, b); }
};

template <class E>
struct ItemsOf {
  typedef Floats type;
};
#if defined(SPECDEC_ISA_avx512_bf16)
template <>
struct ItemsOf<BFloat16> {
  typedef Pairs type;
};
#endif

// Rows of items at a fixed distance, row `first` at data.
struct ItemRows {
  const char* data;
  int64_t stride;  // bytes
  int64_t first;
  const Item* row(int64_t index) const { return (const Item*)(data + (index - first) * stride); }
};

// Columns offset..offset+kLanes-1 of kLanes rows.
SPECDEC_INLINE void load_transposed(const Item* const* rows, int64_t offset,
                                    U32 (&columns)[kLanes]) {
#if defined(__AVX512F__) && defined(SPECDEC_ISA_avx512)
  // The loads bring quarters of four rows together, so that two stages are left to shuffle.
  __m512i fours[4][4];  // [quarter][row % 4]: that quarter of rows r, r + 4, r + 8, r + 12
  for (int quarter = 0; quarter < 4; ++quarter)
    for (int r = 0; r < 4; ++r) {
      __m512i four = _mm512_setzero_si512();
      for (int i = 0; i < 4; ++i) {
        const __m128i piece =
            _mm_loadu_si128((const __m128i*)(rows[r + 4 * i] + offset + 4 * quarter));
        four = _mm512_mask_broadcast_i32x4(four, __mmask16(0xf << 4 * i), piece);
      }
      fours[quarter][r] = four;
    }
  for (int quarter = 0; quarter < 4; ++quarter) {
    const __m512i* r = fours[quarter];
    const __m512i low01 = _mm512_maskz_unpacklo_epi32(0xffff, r[0], r[1]);
    const __m512i low23 = _mm512_maskz_unpacklo_epi32(0xffff, r[2], r[3]);
    const __m512i high01 = _mm512_maskz_unpackhi_epi32(0xffff, r[0], r[1]);
    const __m512i high23 = _mm512_maskz_unpackhi_epi32(0xffff, r[2], r[3]);
    columns[4 * quarter] = (U32)_mm512_maskz_unpacklo_epi64(0xff, low01, low23);
    columns[4 * quarter + 1] = (U32)_mm512_maskz_unpackhi_epi64(0xff, low01, low23);
    columns[4 * quarter + 2] = (U32)_mm512_maskz_unpacklo_epi64(0xff, high01, high23);
    columns[4 * quarter + 3] = (U32)_mm512_maskz_unpackhi_epi64(0xff, high01, high23);
  }
#else
  for (int i = 0; i < kLanes; ++i) columns[i] = load_items(rows[i] + offset);
  transpose(columns);
#endif
}

// Pairs (a[i], b[i]) of the bf16 values of two vectors, in order.
SPECDEC_INLINE void interleave_halves(U32 a, U32 b, U32* low, U32* high) {
#if defined(__AVX512BW__) && defined(SPECDEC_ISA_avx512)
  const __m512i order_low =
      _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                       37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i order_high =
      _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54,
                       22, 53, 21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
  *low = (U32)_mm512_permutex2var_epi16((__m512i)a, order_low, (__m512i)b);
  *high = (U32)_mm512_permutex2var_epi16((__m512i)a, order_high, (__m512i)b);
#else
  const U32 even = (a & 0xffffu) | (b << 16), odd = (a >> 16) | (b & 0xffff0000u);
  *low = interleave_low(even, odd);
  *high = interleave_high(even, odd);
#endif
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
