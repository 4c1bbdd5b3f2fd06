// The online softmax of a block of keys: scores become weights, of one row or of a vector of rows.
//
// Both add the weights of a row in one order: kLanes sums of every kLanes-th key, then the sums in
// halves. Keys beyond the block, and hidden ones, weigh exactly 0.
#pragma once

#include "tree_attention/plan.h"
#include "tree_attention/softmax_math.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

constexpr float kInfinity = __builtin_huge_valf();

// From a product of query and key to a score in units of log 2.
struct ScoreScale {
  float factor;
  float cap;  // 0: none, else factor leads to the argument of tanh
  // Whether the factor may wait for the exponential: maxima must be maxima before it too.
  bool waits() const { return cap == 0 && factor > 0; }
};

SPECDEC_INLINE F32 scaled_score(F32 product, const ScoreScale& scale) {
  if (scale.waits()) return product;
  const F32 score = product * scale.factor;
  return scale.cap > 0 ? tanh(score) * scale.cap : score;
}

// What is known of a row so far.
struct RowState {
  float* max;  // in units of log 2
  float* denom;
  float* rescale;  // what the new maximum does to the old output
};

SPECDEC_INLINE F32 weight_of(F32 score, float factor, F32 base) {
  return exp2_nonpositive(fma(score, broadcast(factor), -base));
}

SPECDEC_INLINE F32 finite_base(F32 max) { return select(max == broadcast(-kInfinity), F32{}, max); }

// ---- one row

SPECDEC_INLINE F32 mask_keys(F32 scores, uint64_t bits) {
  I32 lane_bit;
  for (int lane = 0; lane < kLanes; ++lane) lane_bit[lane] = 1 << lane;
  const I32 hidden = (broadcast_i32(int32_t(bits & low_bits(kLanes))) & lane_bit) == 0;
  return select(hidden, broadcast(-kInfinity), scores);
}

SPECDEC_INLINE void store_weight(Floats, Item* weights, F32 weight) {
  store_items(weights, bit_cast<U32>(weight));
}
SPECDEC_INLINE void store_weight(Pairs, Item* weights, F32 weight) {
  BFloat16 halves[kLanes];
  store(halves, weight);
  std::memcpy(weights, halves, sizeof(halves));
}

// scores [vectors * kLanes] become weights in the same place; visible: words, or nullptr for all.
template <class M>
void softmax_row(float* scores, int vectors, const uint64_t* visible, ScoreScale scale,
                 const RowState& state) {
  F32 top = broadcast(-kInfinity);
  const bool plain = visible == nullptr && scale.waits();
  for (int i = 0; i < vectors; ++i) {
    F32 score = load(scores + i * kLanes);
    if (!plain) {
      score = scaled_score(score, scale);
      if (visible != nullptr)
        score = mask_keys(score, visible[i * kLanes / kWordKeys] >> (i * kLanes % kWordKeys));
      store(scores + i * kLanes, score);
    }
    top = larger(score, top);
  }
  const float factor = scale.waits() ? scale.factor : 1.0f;
  const float block_max = reduce_max(top) * factor;
  const float max = block_max > *state.max ? block_max : *state.max;
  const F32 base = finite_base(broadcast(max));
  *state.rescale = exp2_nonpositive(*state.max - base[0]);
  F32 sum = {};
  for (int i = 0; i < vectors; ++i) {
    const F32 weight = weight_of(load(scores + i * kLanes), factor, base);
    store_weight(M(), (Item*)scores + i * kLanes / M::kElements, weight);
    sum = sum + weight;
  }
  *state.denom = *state.denom * *state.rescale + reduce_add(sum);
  *state.max = max;
}

// ---- a vector of rows

// Scales, if that can't wait, and masks the scores of keys 0..keys-1; words: [2 * kBlockWords]
// vectors of 32 visibility bits per row, or nullptr when all are visible.
SPECDEC_INLINE void finish_columns(float* scores, int64_t stride, int keys, const int32_t* words,
                                   int64_t words_stride, ScoreScale scale) {
  for (int begin = 0; begin < keys; begin += 32) {
    const I32 word = words == nullptr ? broadcast_i32(-1)
                                      : *(const I32Unaligned*)(words + begin / 32 * words_stride);
    for (int i = 0; i < 32 && begin + i < keys; ++i) {
      float* at = scores + (begin + i) * stride;
      const I32 hidden = (word & broadcast_i32(int32_t(uint32_t(1) << i))) == 0;
      store(at, select(hidden, broadcast(-kInfinity), scaled_score(load(at), scale)));
    }
  }
}

SPECDEC_INLINE void store_weights(Floats, float* at, int64_t stride, F32 even, F32 odd) {
  store(at, even);
  store(at + stride, odd);
}
SPECDEC_INLINE void store_weights(Pairs, float* at, int64_t, F32 even, F32 odd) {
  store_items((Item*)at, make_pairs(even, odd));
}

// scores: keys 0..keys-1, stride floats apart, become weights; a pair stands where its even key
// stood. keys is a multiple of kLanes. State and words are those of these rows.
template <class M>
void softmax_columns(float* scores, int64_t stride, int keys, const int32_t* words,
                     int64_t words_stride, ScoreScale scale, const RowState& state) {
  if (words != nullptr || !scale.waits())
    finish_columns(scores, stride, keys, words, words_stride, scale);
  const float factor = scale.waits() ? scale.factor : 1.0f;
  F32 top[4];
  for (int i = 0; i < 4; ++i) top[i] = broadcast(-kInfinity);
  for (int key = 0; key < keys; key += 4)
    for (int i = 0; i < 4; ++i) top[i] = larger(load(scores + (key + i) * stride), top[i]);
  top[0] = larger(larger(top[0], top[1]), larger(top[2], top[3])) * factor;
  const F32 old_max = load(state.max), max = larger(top[0], old_max);
  const F32 base = finite_base(max), rescale = exp2_nonpositive(old_max - base);
  F32 sums[kLanes];
  for (int lane = 0; lane < kLanes; lane += 2) {
    F32 even_sum = {}, odd_sum = {};
    for (int key = lane; key < keys; key += kLanes) {
      float* at = scores + key * stride;
      const F32 even = weight_of(load(at), factor, base);
      const F32 odd = weight_of(load(at + stride), factor, base);
      store_weights(M(), at, stride, even, odd);
      even_sum = even_sum + even;
      odd_sum = odd_sum + odd;
    }
    sums[lane] = even_sum;
    sums[lane + 1] = odd_sum;
  }
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) sums[lane] = sums[lane] + sums[lane + half];
  store(state.denom, load(state.denom) * rescale + sums[0]);
  store(state.max, max);
  store(state.rescale, rescale);
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
