// Passes over one row of logits, each reading the raw row: processed logits are never stored.
#pragma once

#include "common/masses.h"
#include "common/philox.h"
#include "common/source.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

constexpr int64_t kBlock = 4 * kLanes;    // tokens per call of the generator
constexpr int64_t kStride = 16 * kLanes;  // tokens whose largest logit is kept

inline int64_t num_strides(int64_t vocab) { return (vocab + kStride - 1) / kStride; }

// ---- the largest element

struct Extreme {
  float largest = -kInfinity;  // NaN aside
  int64_t id = 0;              // the lowest one that holds it
  bool has_nan = false;

  void merge_later(const Extreme& later) {
    has_nan = has_nan || later.has_nan;
    if (later.largest > largest) {
      largest = later.largest;
      id = later.id;
    }
  }
};

// Calls visit(first, end) for the vectors of a stride that may be cut short. In a whole one the
// compiler sees that every vector is.
template <int kStep = kLanes, class Visit>
SPECDEC_INLINE void each_vector_of_stride(int64_t begin, int64_t end, Visit visit) {
  if (end - begin >= kStride) {
    for (int64_t i = 0; i < kStride; i += kStep) visit(begin + i, begin + kStride);
  } else {
    for (int64_t first = begin; first < end; first += kStep) visit(first, end);
  }
}

// The largest element of each lane in the stride begin..end; NaN is left out and noted in `nan`.
template <class Source>
SPECDEC_INLINE F32 stride_maxima(Source& row, int64_t begin, int64_t end, I32& nan) {
  F32 even = broadcast(-kInfinity), odd = even;
  each_vector_of_stride<2 * kLanes>(
      begin, end, [&](int64_t first, int64_t stop) __attribute__((always_inline)) {
        const F32 a = row.vector(first, stop), b = row.vector(first + kLanes, stop);
        nan |= unordered(a, b);
        even = vmax(a, even);
        odd = vmax(b, odd);
      });
  return vmax(even, odd);
}

// begin is a multiple of kStride. Writes the largest element of every stride to `strides`, which
// belongs to the whole row, or is null.
template <class Source>
Extreme find_extreme(Source row, int64_t begin, int64_t end, float* strides = nullptr) {
  Extreme result;
  I32 nan = {};
  result.id = begin;
  int64_t at = begin;
  bool found = false;
  for (int64_t start = begin; start < end; start += kStride) {
    const F32 maxima =
        stride_maxima(row, start, start + kStride < end ? start + kStride : end, nan);
    if (strides != nullptr) strides[start / kStride] = reduce_max(maxima);
    if (!any(maxima > result.largest)) continue;
    result.largest = reduce_max(maxima);
    at = start;
    found = true;
  }
  result.has_nan = any(nan);
  while (found && row.value(at) != result.largest) ++at;
  result.id = at;
  return result;
}

// The lowest id of the largest finite element, or 0: what a row with NaN falls back to.
template <class Source>
int64_t find_largest_finite(Source row) {
  float largest = -kInfinity;
  int64_t id = 0;
  for (int64_t first = 0; first < row.size(); first += kLanes) {
    const F32 values = row.vector(first, row.size());
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!(values[lane] > largest) || values[lane] == kInfinity) continue;
      largest = values[lane];
      id = first + lane;
    }
  }
  return id;
}

// ---- processed logits, less their maximum

// A cheap copy, taken by value by every pass over it.
template <class Source>
struct Row {
  Source source;
  int64_t size;
  float temperature;
  float largest;         // of the logits / temperature
  const float* strides;  // the largest logit of every stride, or null

  Row(const Source& logits, float row_temperature, float raw_largest,
      const float* stride_maxima = nullptr)
      : source(logits), size(logits.size()), temperature(row_temperature), strides(stride_maxima) {
    if (!(temperature < 0x1.fffffep+127f)) temperature = 0x1.fffffep+127f;
    largest = raw_largest / temperature;
  }

  // kLanes values from `first` on; -infinity beyond the end. +infinity counts as one-hot.
  SPECDEC_INLINE F32 values(int64_t first) { return values(first, size); }
  SPECDEC_INLINE F32 values(int64_t first, int64_t end) {
    return values_of(source.vector(first, end));
  }
  SPECDEC_INLINE F32 values_of(F32 logits) const {
    const F32 scaled = temperature == 1.0f ? logits : logits / temperature;  // division is slow
    if (largest == kInfinity)
      return select(scaled == kInfinity, broadcast(0.0f), broadcast(-kInfinity));
    return scaled - largest;
  }
  float value(int64_t id) const { return value_of(source.value(id)); }
  float value_of(float logit) const {
    const float scaled = logit / temperature;
    if (largest == kInfinity) return scaled == kInfinity ? 0.0f : -kInfinity;
    return scaled - largest;
  }
  // Whether the stride that begins at `start` is known to have no value of `floor` or above.
  bool is_below(int64_t start, float floor) const {
    return strides != nullptr && !(value_of(strides[start / kStride]) >= floor);
  }
};

// Tokens, ascending, and their values; whole vectors, filled up with -infinity.
struct TokenList {
  int32_t* ids = nullptr;
  float* listed = nullptr;
  int64_t size = 0;

  SPECDEC_INLINE F32 values(int64_t first, int64_t) const { return load(listed + first); }
  bool is_below(int64_t, float) const { return false; }
  // Whole vectors may be written beyond the end.
  void append(I32 mask, int64_t first, F32 some) {
    compress(mask, first_lanes(int32_t(first)), ids + size);
    size += compress(mask, some, listed + size);
  }
  void pad() {
    for (int64_t i = size; i % kLanes != 0; ++i) ids[i] = 0, listed[i] = -kInfinity;
  }
};

// The tokens that the filters leave, as a threshold on a row's values. Where they are few they are
// listed too, in memory of the thread that lasts until it filters its next row.
struct KeptSet {
  float threshold = -0x1.fffffep+127f;
  TokenList list;

  bool is_listed() const { return list.ids != nullptr; }

  SPECDEC_INLINE I32 mask(F32 values) const { return values >= threshold; }
  bool has(float value) const { return value >= threshold; }
};

// ---- masses of values

// Of the values begin..end of a Row or a TokenList, those of `floor` and above; begin is a multiple
// of kStride. `vocab` sets the scale.
template <class Values>
int64_t mass_above(Values some, float floor, int64_t vocab, int64_t begin, int64_t end) {
  const float scale = power_of_two(mass_bits(vocab));
  floor = floor > kNegligible ? floor : kNegligible;
  MassSum sum;
  for (int64_t start = begin; start < end; start += kStride) {
    if (some.is_below(start, floor)) continue;
    each_vector_of_stride(start, end,
                          [&](int64_t first, int64_t stop) __attribute__((always_inline)) {
                            const F32 values = some.values(first, stop);
                            sum.add(select(values >= floor, exp_in_range(values) * scale, F32{}));
                          });
  }
  return sum.total();
}

template <class Source>
int64_t total_mass(const Row<Source>& row, const KeptSet& kept) {
  return kept.is_listed() ? mass_above(kept.list, kNegligible, row.size, 0, kept.list.size)
                          : mass_above(row, kept.threshold, row.size, 0, row.size);
}

// ---- drawing by argmax of score + Gumbel noise

struct Drawn {
  float score = -kInfinity;
  int64_t id = -1;

  void merge_later(const Drawn& later) {
    if (later.score > score) *this = later;
  }
};

class GumbelScan {
 public:
  GumbelScan(const Noise& noise, const int64_t* excluded, int64_t num_excluded)
      : noise_(noise), excluded_(excluded), num_excluded_(num_excluded) {}

  // Four vectors of scores from token `first` on, a multiple of kBlock; -infinity is no candidate.
  // Exact, but noise is only drawn, and logarithms only taken, where the best could be beaten.
  SPECDEC_INLINE void block(const F32 scores[4], int64_t first) {
    const F32 highest = vmax(vmax(scores[0], scores[1]), vmax(scores[2], scores[3]));
    if (!any(highest + kLargestGumbel > best_.score)) return;
    U32 words[4];
    consecutive_words(noise_, first, words);
    for (int j = 0; j < 4; ++j) {
      const F32 u = to_uniform<F32>(words[j]);
      if (!any(may_beat(scores[j], u))) continue;
      const F32 total = scores[j] + gumbel(u);
      if (any(total > best_.score)) take(total, first + j * kLanes);
    }
  }
  // A vector of scores of any tokens.
  void tokens(F32 scores, U32 ids) {
    U32 words[4];
    philox<U32>(noise_, ids >> 2, words);
    const U32 which = ids & 3u;
    const U32 low = which == 0u ? words[0] : words[1], high = which == 2u ? words[2] : words[3];
    const F32 total = scores + gumbel(to_uniform<F32>(which < 2u ? low : high));
    for (int lane = 0; lane < kLanes; ++lane) take(total[lane], ids[lane]);
  }
  const Drawn& best() const { return best_; }

 private:
  // Gumbel(u) < -log(u), and log2(u) is at least the bits of u read as a fixed-point number.
  SPECDEC_INLINE I32 may_beat(F32 scores, F32 u) const {
    const float slack = 1e-3f + 1e-6f * (best_.score < 0.0f ? -best_.score : best_.score);
    const F32 log2_u = Lanes<F32>::to_float(bit_cast<I32>(u)) * 0x1p-23f - 127.0f;
    return log2_u + (best_.score - slack - scores) * 1.4426950f <= 0.0f;
  }
  void take(F32 total, int64_t first) {
    for (int lane = 0; lane < kLanes; ++lane) take(total[lane], first + lane);
  }
  void take(float total, int64_t id) {
    if (!(total > best_.score) || is_excluded(id)) return;
    best_.score = total;
    best_.id = id;
  }
  bool is_excluded(int64_t id) const {
    for (int64_t i = 0; i < num_excluded_; ++i)
      if (excluded_[i] == id) return true;
    return false;
  }

  Noise noise_;
  const int64_t* excluded_;
  int64_t num_excluded_;
  Drawn best_;
};

// Draws from softmax(scores(first)), kLanes scores at a time, over begin..end; begin is a multiple
// of kBlock.
template <class Scores>
SPECDEC_INLINE Drawn draw(const Noise& noise, int64_t begin, int64_t end, Scores scores,
                          const int64_t* excluded = nullptr, int64_t num_excluded = 0) {
  GumbelScan scan(noise, excluded, num_excluded);
  for (int64_t first = begin; first < end; first += kBlock) {
    F32 block[4];
    for (int j = 0; j < 4; ++j) block[j] = scores(first + j * kLanes);
    scan.block(block, first);
  }
  return scan.best();
}

inline Drawn draw_listed(const TokenList& list, const Noise& noise, const int64_t* excluded,
                         int64_t num_excluded) {
  GumbelScan scan(noise, excluded, num_excluded);
  for (int64_t i = 0; i < list.size; i += kLanes)
    scan.tokens(list.values(i, list.size), (U32) * (const I32Unaligned*)(list.ids + i));
  return scan.best();
}

// Draws from the kept tokens begin..end, less the excluded ones.
template <class Source>
Drawn draw_kept(Row<Source> row, const KeptSet& kept, const Noise& noise, int64_t begin,
                int64_t end, const int64_t* excluded = nullptr, int64_t num_excluded = 0) {
  if (kept.is_listed()) return draw_listed(kept.list, noise, excluded, num_excluded);
  const auto scores = [&](int64_t first) {
    const F32 values = row.values(first);
    return select(kept.mask(values), values, broadcast(-kInfinity));
  };
  return draw(noise, begin, end, scores, excluded, num_excluded);
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
