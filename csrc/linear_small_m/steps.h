// How one step along k multiplies, per dtype: kStep elements of a weight row, as kParts vectors, by
// the packed values of a row of x.
#pragma once

#include "common/bf16_dot.h"
#include "common/vec.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

template <class T>
struct Steps {  // fp32 and fp16
  typedef float Packed;
  static constexpr int kParts = 1;
  static constexpr int64_t kStep = kLanes;

  template <int part>
  SPECDEC_INLINE static F32 weight(const T* source) {
    return load(source);
  }
  SPECDEC_INLINE static F32 value(const float* packed) { return load(packed); }
  SPECDEC_INLINE static F32 multiply(F32 sum, F32 weight, F32 value) {
    return fma(weight, value, sum);
  }
  // The parts of one row of x lie `part_stride` apart.
  SPECDEC_INLINE static void pack(const T* source, float* packed, int64_t) {
    store(packed, load(source));
  }
};

#if defined(SPECDEC_ISA_avx512_bf16)

template <>
struct Steps<BFloat16> {
  typedef BFloat16 Packed;
  static constexpr int kParts = 1;
  static constexpr int64_t kStep = 2 * kLanes;

  template <int part>
  SPECDEC_INLINE static U32 weight(const BFloat16* source) {
    return load_pairs(source);
  }
  SPECDEC_INLINE static U32 value(const BFloat16* packed) { return load_pairs(packed); }
  SPECDEC_INLINE static F32 multiply(F32 sum, U32 weight, U32 value) {
    return dot_pairs(sum, weight, value);
  }
  SPECDEC_INLINE static void pack(const BFloat16* source, BFloat16* packed, int64_t) {
    std::memcpy(packed, source, kStep * sizeof(BFloat16));
  }
};

#else

// Volatile: taken from the cache at each use, so that it occupies no register.
const volatile U32 kSecondOfPairs = U32{} + 0xffff0000u;

// First and second elements of the pairs apart: each half then costs one instruction.
template <>
struct Steps<BFloat16> {
  typedef float Packed;
  static constexpr int kParts = 2;
  static constexpr int64_t kStep = 2 * kLanes;

  template <int part>
  SPECDEC_INLINE static F32 weight(const BFloat16* source) {
    const U32 pairs = load_pairs(source);
    return part == 0 ? first_of_pairs(pairs) : bit_cast<F32>(pairs & kSecondOfPairs);
  }
  SPECDEC_INLINE static F32 value(const float* packed) { return load(packed); }
  SPECDEC_INLINE static F32 multiply(F32 sum, F32 weight, F32 value) {
    return fma(weight, value, sum);
  }
  SPECDEC_INLINE static void pack(const BFloat16* source, float* packed, int64_t part_stride) {
    store(packed, weight<0>(source));
    store(packed + part_stride, weight<1>(source));
  }
};

#endif

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
