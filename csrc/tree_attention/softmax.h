// The online softmax of a block of keys: scores become weights, of one row, of several rows or of a
// vector of rows.
//
// All add the weights of a row in one order: kLanes sums of every kLanes-th key, then the sums in
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

// Scores become weights.
template <int count>
SPECDEC_INLINE void weigh(Floats, F32 (&scores)[count], float factor, F32 base) {
  for (F32& x : scores) x = exp2_nonpositive(fma(x, broadcast(factor), -base));
}
template <int count>
SPECDEC_INLINE void weigh(Pairs, F32 (&scores)[count], float factor, F32 base) {
  for (F32& x : scores) x = fma(x, broadcast(factor), -base);
  short_exp2_nonpositive(scores);
}

SPECDEC_INLINE F32 finite_base(F32 max) { return select(max == broadcast(-kInfinity), F32{}, max); }

ScoreScale score_scale(const TreeAttentionParams& p) {
  if (p.softcap > 0) return {p.scale / p.softcap, p.softcap * kLog2E};
  return {p.scale * kLog2E, 0};
}

// ---- one row

SPECDEC_INLINE F32 mask_keys(F32 scores, uint64_t bits) {
  I32 lane_bit;
  for (int lane = 0; lane < kLanes; ++lane) lane_bit[lane] = 1 << lane;
  const I32 hidden = (broadcast_i32(int32_t(bits & low_bits(kLanes))) & lane_bit) == 0;
  return select(hidden, broadcast(-kInfinity), scores);
}

template <int count>
SPECDEC_INLINE void store_row(Floats, Item* at, const F32 (&weights)[count]) {
  for (int i = 0; i < count; ++i) store_items(at + i * kLanes, bit_cast<U32>(weights[i]));
}
template <int count>
SPECDEC_INLINE void store_row(Pairs, Item* at, const F32 (&weights)[count]) {
  store_rounded((BFloat16*)at, weights);
}

// Scales, if that can't wait, and masks the scores of a row, [vectors * kLanes]; visible: words, or
// nullptr for all. Returns the largest of every lane.
SPECDEC_INLINE F32 finish_row(float* scores, int vectors, const uint64_t* visible,
                              ScoreScale scale) {
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
  return top;
}

// Finished scores become weights in the same place; adds to the sum of every lane.
template <class M, int count>
SPECDEC_INLINE void weigh_vectors(float* scores, int first, float factor, F32 base, F32* sum) {
  F32 x[count];
  for (int i = 0; i < count; ++i) x[i] = load(scores + (first + i) * kLanes);
  weigh(M(), x, factor, base);
  store_row(M(), (Item*)scores + first * kLanes / M::kElements, x);
  for (int i = 0; i < count; ++i) *sum = *sum + x[i];
}

template <class M>
SPECDEC_INLINE F32 weigh_row(float* scores, int vectors, float factor, F32 base) {
  constexpr int kMany = kLanes == 16 ? 4 : 1;
  F32 sum = {};
  int i = 0;
  for (; i + kMany <= vectors; i += kMany) weigh_vectors<M, kMany>(scores, i, factor, base, &sum);
  for (; i < vectors; ++i) weigh_vectors<M, 1>(scores, i, factor, base, &sum);
  return sum;
}

template <class M>
void softmax_row(float* scores, int vectors, const uint64_t* visible, ScoreScale scale,
                 const RowState& state) {
  const F32 top = finish_row(scores, vectors, visible, scale);
  const float factor = scale.waits() ? scale.factor : 1.0f;
  const float block_max = reduce_max(top) * factor;
  const float max = block_max > *state.max ? block_max : *state.max;
  const F32 base = finite_base(broadcast(max));
  *state.rescale = exp2_nonpositive(*state.max - base[0]);
  const F32 sum = weigh_row<M>(scores, vectors, factor, base);
  *state.denom = *state.denom * *state.rescale + reduce_add(sum);
  *state.max = max;
}

// ---- kLanes rows at once

// Lane i becomes values[i] reduced over its lanes, in halves.
template <class Join>
SPECDEC_INLINE F32 reduce_each(F32 (&values)[kLanes], const Join& join) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) {
      const U32 a = bit_cast<U32>(values[i]), b = bit_cast<U32>(values[i + half]);
      values[i] = join(bit_cast<F32>(interleave_low(a, b)), bit_cast<F32>(interleave_high(a, b)));
    }
  return values[0];
}

// The scores of `rows` <= kLanes rows, `stride` floats apart, become weights; visible(row) is what
// finish_row wants, between() is called once per row.
template <class M, class Visible, class Between>
SPECDEC_INLINE void softmax_rows(float* scores, int64_t stride, int rows, int vectors,
                                 const Visible& visible, ScoreScale scale, const RowState& state,
                                 const Between& between) {
  F32 lanes[kLanes];
  for (int row = 0; row < rows; ++row)
    lanes[row] = finish_row(scores + row * stride, vectors, visible(row), scale);
  for (int row = rows; row < kLanes; ++row) lanes[row] = broadcast(-kInfinity);
  const float factor = scale.waits() ? scale.factor : 1.0f;
  const F32 top = reduce_each(lanes, [](F32 a, F32 b) { return larger(a, b); }) * factor;
  const F32 old_max = load(state.max), max = larger(top, old_max);
  const F32 base = finite_base(max), rescale = exp2_nonpositive(old_max - base);
  float bases[kLanes];
  store(bases, base);
  for (int row = 0; row < rows; ++row) {
    between();
    lanes[row] = weigh_row<M>(scores + row * stride, vectors, factor, broadcast(bases[row]));
  }
  for (int row = rows; row < kLanes; ++row) lanes[row] = F32{};
  const F32 sum = reduce_each(lanes, [](F32 a, F32 b) { return a + b; });
  store(state.denom, load(state.denom) * rescale + sum);
  store(state.max, max);
  store(state.rescale, rescale);
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
  F32 sums[kLanes] = {};  // in registers: keys kLanes rows apart would share few sets of the cache
  for (int key = 0; key < keys; key += kLanes) {
    _Pragma("GCC unroll 16") for (int lane = 0; lane < kLanes; lane += 2) {
      float* at = scores + (key + lane) * stride;
      F32 x[] = {load(at), load(at + stride)};
      weigh(M(), x, factor, base);
      store_weights(M(), at, stride, x[0], x[1]);
      sums[lane] = sums[lane] + x[0];
      sums[lane + 1] = sums[lane + 1] + x[1];
    }
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
