// Drawing by argmax of score + Gumbel noise.
#pragma once

#include "common/philox.h"
#include "common/source.cuh"
#include "common/top_keys.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// One thread's best total so far. Tokens are seen in ascending order, so the lowest id wins ties.
//
// Noise is drawn, and logarithms taken, only where the best total of the block could be reached:
// u must be small enough, which is one comparison of a random word. What is left out lies further
// below than second() has to be exact for.
class GumbelScan {
 public:
  // `floor` is what new_floor() returned.
  SPECDEC_INLINE GumbelScan(const Noise& noise, uint32_t* floor) : noise_(noise), floor_(floor) {}

  // The block's best total as an ordered key. Called by all threads, before any of them sees a
  // token.
  static __device__ uint32_t* new_floor() {
    SPECDEC_SHARED(uint32_t, floor);
    __syncthreads();
    if (threadIdx.x == 0) floor = ordered_key(-kInfinity);
    __syncthreads();
    return &floor;
  }

  // Tokens first .. first + kPack - 1, of which score(j) is the score; -infinity is no candidate.
  // No score is above `bound` (by more than 1e-6 of its size).
  template <int kPack, class Score>
  SPECDEC_INLINE void see(float bound, int64_t first, Score score) {
    if (!(lead_over(bound) < kLargestGumbel)) return;
    uint32_t words[kPack];
    draw_words(first, words);
    const bool is_new = best_ == -kInfinity;
    if (is_new) see_one(score(0), words[0], first);  // the others may then be told by their words
    const uint32_t limit = largest_word(lead_over(bound));
    uint32_t lowest = words[0];
#pragma unroll
    for (int j = 1; j < kPack; ++j) lowest = min(lowest, words[j]);
    if (lowest > limit) return;
#pragma unroll 1
    for (int j = is_new ? 1 : 0; j < kPack; ++j) {  // seldom: one copy of the code
      const uint32_t word = pick(words, j);
      if (word <= limit) see_one(score(j), word, first + j);
    }
  }

  // 0 where nothing was a candidate.
  SPECDEC_INLINE Key key() const { return best_ == -kInfinity ? 0 : to_key(best_, id_); }
  // The best total of all other tokens.
  SPECDEC_INLINE float second() const { return second_; }

 private:
  // What noise must exceed to reach the block's best, less what rounding can take.
  SPECDEC_INLINE float lead_over(float bound) const {
    const float best = from_ordered_key(*static_cast<volatile uint32_t*>(floor_));
    return best - (1e-3f + 1e-6f * fabsf(best)) - bound;
  }

  // Gumbel(u) < -log(u), so noise above `lead` needs u < exp(-lead).
  static SPECDEC_INLINE uint32_t largest_word(float lead) {
    const float share = exp2f(lead * -1.4426950f) * 1.001f;
    return share < 0.999f ? static_cast<uint32_t>(share * 0x1p32f) : ~0u;
  }

  template <int kPack>
  SPECDEC_INLINE void draw_words(int64_t first, uint32_t (&words)[kPack]) const {
    uint32_t all[kPack + 4];
    const uint32_t block = static_cast<uint32_t>(first / 4);
    const int shift = static_cast<int>(first % 4);  // other than 0 in rows of odd sizes
#pragma unroll
    for (int i = 0; i <= kPack / 4; ++i) {
      uint32_t four[4] = {};
      if (i < kPack / 4 || shift != 0) philox<uint32_t>(noise_, block + i, four);
#pragma unroll
      for (int j = 0; j < 4; ++j) all[4 * i + j] = four[j];
    }
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const uint32_t low = shift & 1 ? all[j + 1] : all[j];
      const uint32_t high = shift & 1 ? all[j + 3] : all[j + 2];
      words[j] = shift & 2 ? high : low;
    }
  }

  SPECDEC_INLINE void see_one(float score, uint32_t word, int64_t id) {
    const float total = score + gumbel(to_uniform<float>(word));
    if (total > best_) {
      second_ = best_;
      best_ = total;
      id_ = id;
      atomicMax(floor_, ordered_key(total));
    } else if (total > second_) {
      second_ = total;
    }
  }

  Noise noise_;
  uint32_t* floor_;
  float best_ = -kInfinity;
  float second_ = -kInfinity;
  int64_t id_ = 0;
};

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
