// A vector of kLanes floats and what kernels do with it, written once for every instruction set.
//
// Built on the vector extensions of GCC and Clang, so + - * / and comparisons are operators and the
// compiler picks the instructions of the object file's -m flags. Everything has internal linkage:
// an object built for AVX-512 must never lend an inline function to one built for less.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/params.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef SPECDEC_ISA
#error "vec.h belongs to per-ISA objects: SPECDEC_ISA names the namespace"
#endif

#define SPECDEC_INLINE __attribute__((always_inline)) inline
#define SPECDEC_PRAGMA(text) _Pragma(#text)
#define SPECDEC_UNROLL(count) SPECDEC_PRAGMA(GCC unroll count)

namespace specdec {
namespace SPECDEC_ISA {
namespace {

#if defined(SPECDEC_ISA_avx512)
constexpr int kLanes = 16;
#elif defined(SPECDEC_ISA_avx2)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float F32 __attribute__((vector_size(kLanes * 4)));
typedef int32_t I32 __attribute__((vector_size(kLanes * 4)));
typedef uint32_t U32 __attribute__((vector_size(kLanes * 4)));
typedef uint16_t U16 __attribute__((vector_size(kLanes * 2)));
typedef F32 F32Unaligned __attribute__((aligned(4), may_alias));
typedef I32 I32Unaligned __attribute__((aligned(4), may_alias));
typedef U16 U16Unaligned __attribute__((aligned(2), may_alias));

template <class To, class From>
SPECDEC_INLINE To bit_cast(const From& value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

SPECDEC_INLINE F32 broadcast(float value) { return value - F32{}; }
SPECDEC_INLINE I32 broadcast_i32(int32_t value) { return value - I32{}; }

SPECDEC_INLINE F32 select(I32 mask, F32 yes, F32 no) { return mask ? yes : no; }
SPECDEC_INLINE I32 select(I32 mask, I32 yes, I32 no) { return mask ? yes : no; }

// a where a > b, else b: a NaN in a yields b.
SPECDEC_INLINE F32 vmax(F32 a, F32 b) { return select(a > b, a, b); }

// Where a or b is NaN.
SPECDEC_INLINE I32 unordered(F32 a, F32 b) {
#if defined(__AVX512F__) && defined(SPECDEC_ISA_avx512)
  return (I32)_mm512_movm_epi32(_mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q));
#elif defined(__AVX2__) && defined(SPECDEC_ISA_avx2)
  return (I32)_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_UNORD_Q);
#else
  return (a != a) | (b != b);
#endif
}

SPECDEC_INLINE F32 fma(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__) && defined(SPECDEC_ISA_avx512)
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(SPECDEC_ISA_avx2)
  return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (F32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// ---- element types: everything is computed in fp32

SPECDEC_INLINE float to_float(float value) { return value; }
SPECDEC_INLINE float to_float(BFloat16 value) {
  return bit_cast<float>(uint32_t(value.bits) << 16);
}

// Exact for every fp16 value, infinities and NaN included: shift the exponent into place, then let
// a multiplication normalise subnormals.
template <class U, class F>
SPECDEC_INLINE F half_bits_to_float(U bits) {
  const U sign = (bits & 0x8000u) << 16;
  const U magnitude = (bits & 0x7fffu) << 13;
  const U is_special = bits & 0x7c00u;
  F value = bit_cast<F>(magnitude) * 0x1p112f;
  U result = bit_cast<U>(value);
  result = is_special == 0x7c00u ? (magnitude | 0x7f800000u) : result;
  return bit_cast<F>(result | sign);
}
SPECDEC_INLINE float to_float(Half value) {
  return half_bits_to_float<uint32_t, float>(value.bits);
}

template <class T>
SPECDEC_INLINE T from_float(float value);
template <>
SPECDEC_INLINE float from_float<float>(float value) {
  return value;
}
template <>
SPECDEC_INLINE BFloat16 from_float<BFloat16>(float value) {  // round to nearest even
  const uint32_t bits = bit_cast<uint32_t>(value);
  if (value != value) return BFloat16{uint16_t(0x7fc0u | (bits >> 16 & 0x8000u))};
  return BFloat16{uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
template <>
SPECDEC_INLINE Half from_float<Half>(float value) {  // round to nearest even
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return Half{uint16_t(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return Half{uint16_t(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {  // subnormal: the addition rounds at the right bit
    const float rounded = bit_cast<float>(magnitude) + 0.5f;
    return Half{uint16_t(sign | (bit_cast<uint32_t>(rounded) - 0x3f000000u))};
  }
  return Half{uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13))};
}

// ---- loads and stores; T is float, BFloat16 or Half, memory need not be aligned

SPECDEC_INLINE F32 load(const float* source) { return *(const F32Unaligned*)source; }
SPECDEC_INLINE F32 load(const BFloat16* source) {
#if defined(__AVX512F__) && defined(SPECDEC_ISA_avx512)
  const __m256i bits = _mm256_loadu_si256((const __m256i*)source);
  return bit_cast<F32>((U32)_mm512_maskz_cvtepu16_epi32(0xffff, bits) << 16);
#elif defined(__AVX2__) && defined(SPECDEC_ISA_avx2)  // GCC widens in two halves by itself
  const __m128i bits = _mm_loadu_si128((const __m128i*)source);
  return bit_cast<F32>((U32)_mm256_cvtepu16_epi32(bits) << 16);
#else
  const U16 bits = *(const U16Unaligned*)source;
  return bit_cast<F32>(__builtin_convertvector(bits, U32) << 16);
#endif
}
SPECDEC_INLINE F32 load(const Half* source) {
#if defined(__AVX512F__) && defined(SPECDEC_ISA_avx512)
  return (F32)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)source));
#elif defined(__F16C__) && defined(SPECDEC_ISA_avx2)
  return (F32)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)source));
#else
  const U16 bits = *(const U16Unaligned*)source;
  return half_bits_to_float<U32, F32>(__builtin_convertvector(bits, U32));
#endif
}

// The first count (< kLanes) elements; the other lanes hold fill. Reads nothing beyond count.
template <class T>
SPECDEC_INLINE F32 load_partial(const T* source, int count, float fill) {
  F32 result = broadcast(fill);
  for (int lane = 0; lane < count; ++lane) result[lane] = to_float(source[lane]);
  return result;
}

SPECDEC_INLINE void store(float* target, F32 value) { *(F32Unaligned*)target = value; }
SPECDEC_INLINE void store(BFloat16* target, F32 value) {
  const U32 bits = bit_cast<U32>(value);
  const U32 rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const U32 quiet = 0x7fc0u | (bits >> 16 & 0x8000u);
  const U32 chosen = (value != value) ? quiet : rounded;
  *(U16Unaligned*)target = __builtin_convertvector(chosen, U16);
}
SPECDEC_INLINE void store(Half* target, F32 value) {
  for (int lane = 0; lane < kLanes; ++lane) target[lane] = from_float<Half>(value[lane]);
}
template <class T>
SPECDEC_INLINE void store_partial(T* target, F32 value, int count) {
  for (int lane = 0; lane < count; ++lane) target[lane] = from_float<T>(value[lane]);
}

// ---- integer lanes, for the random numbers

typedef uint64_t PairU64 __attribute__((vector_size(kLanes * 4)));

// The 64-bit products of the even lanes.
SPECDEC_INLINE PairU64 multiply_even(U32 a, uint32_t b) {
  const U32 factor = b - U32{};
#if defined(__AVX512F__) && defined(SPECDEC_ISA_avx512)
  return (PairU64)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)factor);
#elif defined(__AVX2__) && defined(SPECDEC_ISA_avx2)
  return (PairU64)_mm256_mul_epu32((__m256i)a, (__m256i)factor);
#else
  return ((PairU64)a & 0xffffffffu) * ((PairU64)factor & 0xffffffffu);
#endif
}

// High and low halves of the 64-bit products of all lanes.
SPECDEC_INLINE void multiply_wide(U32 a, uint32_t b, U32& high, U32& low) {
  const PairU64 even = multiply_even(a, b), odd = multiply_even((U32)((PairU64)a >> 32), b);
  I32 is_odd;
  for (int lane = 0; lane < kLanes; ++lane) is_odd[lane] = lane % 2 ? -1 : 0;
  high = is_odd ? (U32)odd : (U32)(even >> 32);
  low = is_odd ? (U32)(odd << 32) : (U32)even;
}

SPECDEC_INLINE U32 shuffle(U32 a, U32 b, U32 index) {
#if defined(__clang__)
  U32 result;
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t from = index[lane];
    result[lane] = from < uint32_t(kLanes) ? a[from] : b[from - kLanes];
  }
  return result;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

// a[0] b[0] a[1] b[1] ... of the lower, or the upper, half of the lanes.
SPECDEC_INLINE U32 interleave_low(U32 a, U32 b) {
  U32 index;
  for (int lane = 0; lane < kLanes; ++lane) index[lane] = lane / 2 + lane % 2 * kLanes;
  return shuffle(a, b, index);
}
SPECDEC_INLINE U32 interleave_high(U32 a, U32 b) {
  U32 index;
  for (int lane = 0; lane < kLanes; ++lane) index[lane] = (lane + kLanes) / 2 + lane % 2 * kLanes;
  return shuffle(a, b, index);
}

// kLanes vectors become kLanes columns, by perfect shuffles of their elements.
SPECDEC_INLINE void transpose(U32 (&rows)[kLanes]) {
  for (int width = 1; width < kLanes; width *= 2) {
    U32 mixed[kLanes];
    _Pragma("GCC unroll 8") for (int i = 0; i < kLanes / 2; ++i) {
      mixed[2 * i] = interleave_low(rows[i], rows[i + kLanes / 2]);
      mixed[2 * i + 1] = interleave_high(rows[i], rows[i + kLanes / 2]);
    }
    std::memcpy(rows, mixed, sizeof(mixed));
  }
}

// ---- reductions over the lanes, always in the same order

SPECDEC_INLINE float reduce_add(F32 value) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) value[lane] = value[lane] + value[lane + half];
  return value[0];
}
SPECDEC_INLINE float reduce_max(F32 value) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane)
      value[lane] = value[lane] > value[lane + half] ? value[lane] : value[lane + half];
  return value[0];
}
SPECDEC_INLINE bool any(I32 mask) {
#if defined(__AVX512F__) && defined(SPECDEC_ISA_avx512)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__) && defined(SPECDEC_ISA_avx2)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#elif defined(__SSE2__) && defined(SPECDEC_ISA_baseline)
  return _mm_movemask_epi8((__m128i)mask) != 0;
#else
  int32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= mask[lane];
  return bits != 0;
#endif
}

// first, first + 1, ...
SPECDEC_INLINE I32 first_lanes(int32_t first) {
  I32 lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
  return lanes + first;
}

// Stores the lanes that mask has, side by side, and returns how many. Whatever stands behind them,
// up to kLanes elements from target on, may be overwritten.
template <class V, class T>
SPECDEC_INLINE int64_t compress(I32 mask, V values, T* target) {
  static_assert(sizeof(V) == kLanes * 4 && sizeof(T) == 4, "32-bit lanes");
#if defined(__AVX512F__) && defined(SPECDEC_ISA_avx512)
  const __mmask16 lanes = _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
  _mm512_storeu_si512(target, _mm512_maskz_compress_epi32(lanes, bit_cast<__m512i>(values)));
  return __builtin_popcount(lanes);
#else
  int64_t count = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    target[count] = values[lane];
    count += mask[lane] != 0;
  }
  return count;
#endif
}

// Whether one of the next count vectors holds value in some lane.
template <int count>
SPECDEC_INLINE bool any_equal(const int32_t* source, I32 value) {
#if defined(__AVX512F__) && defined(SPECDEC_ISA_avx512)
  __mmask16 found = 0;
  for (int i = 0; i < count; ++i)
    found |= _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(source + i * kLanes), (__m512i)value);
  return found != 0;
#else
  I32 found{};
  for (int i = 0; i < count; ++i) found |= *(const I32Unaligned*)(source + i * kLanes) == value;
  return any(found);
#endif
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
