// Register blocks: some rows of x times some rows of the weight, over a stretch of k.
#pragma once

#include "common/amx.h"
#include "linear_small_m/steps.h"

#define SPECDEC_UNROLL _Pragma("GCC unroll 16")

namespace specdec {
namespace SPECDEC_ISA {
namespace {

typedef float F32x4 __attribute__((vector_size(16)));
typedef float F32x8 __attribute__((vector_size(32)));

SPECDEC_INLINE PairU64 shuffle_pairs(PairU64 a, PairU64 b, PairU64 index) {
#if defined(__clang__)
  constexpr int kPairs = kLanes / 2;
  PairU64 result;
  for (int i = 0; i < kPairs; ++i)
    result[i] = index[i] < kPairs ? a[index[i]] : b[index[i] - kPairs];
  return result;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

// In every quarter of the lanes: a0 + a2, b0 + b2, a1 + a3, b1 + b3.
SPECDEC_INLINE F32 fold_two(F32 a, F32 b) {
  U32 low, high;
  for (int lane = 0; lane < kLanes; ++lane) {
    low[lane] = lane / 4 * 4 + lane % 4 / 2 + lane % 2 * kLanes;
    high[lane] = low[lane] + 2;
  }
  const U32 left = bit_cast<U32>(a), right = bit_cast<U32>(b);
  return bit_cast<F32>(shuffle(left, right, low)) + bit_cast<F32>(shuffle(left, right, high));
}

// The lane sums of four vectors, each by the same tree.
SPECDEC_INLINE F32x4 lane_sums(F32 a, F32 b, F32 c, F32 d) {
  PairU64 low, high;
  for (int i = 0; i < kLanes / 2; ++i) {
    low[i] = i / 2 * 2 + i % 2 * (kLanes / 2);
    high[i] = low[i] + 1;
  }
  const PairU64 ab = bit_cast<PairU64>(fold_two(a, b)), cd = bit_cast<PairU64>(fold_two(c, d));
  const F32 sums =
      bit_cast<F32>(shuffle_pairs(ab, cd, low)) + bit_cast<F32>(shuffle_pairs(ab, cd, high));
  if constexpr (kLanes == 4) {
    return bit_cast<F32x4>(sums);
  } else {
    F32x8 eights[kLanes / 8];
    std::memcpy(eights, &sums, sizeof(sums));
    const F32x8 eight = kLanes == 16 ? eights[0] + eights[kLanes / 8 - 1] : eights[0];
    F32x4 fours[2];
    std::memcpy(fours, &eight, sizeof(eight));
    return fours[0] + fours[1];
  }
}

// A stretch of k: `steps` whole steps, then `tail` more elements.
struct Stretch {
  int64_t steps;
  int64_t tail;
  bool first;  // accumulators start from zero
  bool last;   // outputs are complete afterwards
};

// Where the sums of a block go. Output (r, c) belongs at out[r * row_stride + c * column_stride];
// `saved` holds the accumulators between stretches.
struct Target {
  float* saved;
  float* out;
  int64_t row_stride;
  int64_t column_stride;
};

// GCC would rather read a value again at each use, but with AVX-512 loads are what there are too
// few of. With half the registers it knows better.
template <class V>
SPECDEC_INLINE void keep_in_register(V& value) {
#if defined(__AVX512F__)
  asm("" : "+v"(value));
#else
  (void)value;
#endif
}

// One part of a step. The shorter side of the block is held in registers, the longer one passes by.
template <int part, class T, int kRows, int kCols>
SPECDEC_INLINE void multiply(F32 (&sum)[kRows][kCols], const typename Steps<T>::Packed* x,
                             const T* w, int64_t stride) {
  using S = Steps<T>;
  constexpr int64_t kVector = S::kStep / S::kParts;
  if constexpr (kRows < kCols) {
    decltype(S::value(x)) values[kRows];
    SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) {
      values[r] = S::value(x + (part * kRows + r) * kVector);
      keep_in_register(values[r]);
    }
    SPECDEC_UNROLL for (int c = 0; c < kCols; ++c) {
      auto weight = S::template weight<part>(w + c * stride);
      keep_in_register(weight);
      SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) sum[r][c] =
          S::multiply(sum[r][c], weight, values[r]);
    }
  } else {
    decltype(S::template weight<part>(w)) weights[kCols];
    SPECDEC_UNROLL for (int c = 0; c < kCols; ++c) weights[c] =
        S::template weight<part>(w + c * stride);
    SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) {
      auto value = S::value(x + (part * kRows + r) * kVector);
      keep_in_register(value);
      SPECDEC_UNROLL for (int c = 0; c < kCols; ++c) sum[r][c] =
          S::multiply(sum[r][c], weights[c], value);
    }
  }
}

template <class T, int kRows, int kCols>
SPECDEC_INLINE void multiply_step(F32 (&sum)[kRows][kCols], const typename Steps<T>::Packed* x,
                                  const T* w, int64_t stride) {
  multiply<0>(sum, x, w, stride);
  if constexpr (Steps<T>::kParts > 1) {
    asm("" : "+r"(w));  // reading the weights again is cheaper than keeping them
    multiply<1>(sum, x, w, stride);
  }
}

template <int kRows, int kCols>
SPECDEC_INLINE void write_sums(const F32 (&sum)[kRows][kCols], const Target& target) {
  constexpr int kAll = kRows * kCols;
  SPECDEC_UNROLL for (int i = 0; i < kAll; i += 4) {
    F32 four[4];
    SPECDEC_UNROLL for (int j = 0; j < 4; ++j) {
      const int at = i + j < kAll ? i + j : i;
      four[j] = sum[at / kCols][at % kCols];
    }
    const F32x4 sums = lane_sums(four[0], four[1], four[2], four[3]);
    SPECDEC_UNROLL for (int j = 0; j < 4; ++j) {
      const int at = i + j;
      if (at < kAll)
        target.out[at / kCols * target.row_stride + at % kCols * target.column_stride] = sums[j];
    }
  }
}

// Without tiles (measured on Zen 4) lines go to the second cache, which waits for more of them
// at once than the first.
constexpr int kLocality = kHasTiles ? 3 : 2;

// One register block over one stretch of k; `stride` elements lead from one of its weight rows to
// the next. Of row c, the line `ahead[c]` bytes further on is asked for meanwhile: a few requests
// in every step keep memory busier than many at once.
template <class T, int kRows, int kCols>
__attribute__((noinline)) void block(const typename Steps<T>::Packed* x, const T* w, int64_t stride,
                                     const Stretch& k, const int64_t* ahead, const Target& target) {
  constexpr int64_t kStep = Steps<T>::kStep;
  F32 sum[kRows][kCols];
  SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) SPECDEC_UNROLL for (int c = 0; c < kCols; ++c)
      sum[r][c] = k.first ? F32{} : load(target.saved + (r * kCols + c) * kLanes);
  const char* next[kCols];
  SPECDEC_UNROLL for (int c = 0; c < kCols; ++c) next[c] = (const char*)(w + c * stride) + ahead[c];
  const T* const end = w + k.steps * kStep;
  for (int64_t at = 0; w != end; at += kStep * sizeof(T)) {
    SPECDEC_UNROLL for (int c = 0; c < kCols; ++c) __builtin_prefetch(next[c] + at, 0, kLocality);
    multiply_step(sum, x, w, stride);
    x += kRows * kStep;
    w += kStep;
  }
  if (k.tail > 0) {
    T padded[kCols * kStep] = {};
    for (int c = 0; c < kCols; ++c)
      std::memcpy(padded + c * kStep, w + c * stride, k.tail * sizeof(T));
    multiply_step(sum, x, padded, kStep);
  }
  if (k.last) {
    write_sums(sum, target);
  } else {
    SPECDEC_UNROLL for (int r = 0; r < kRows; ++r) SPECDEC_UNROLL for (int c = 0; c < kCols; ++c)
        store(target.saved + (r * kCols + c) * kLanes, sum[r][c]);
  }
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
