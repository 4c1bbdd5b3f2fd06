// Deciding rows: each is scanned by several blocks, and the last of them finishes it. One pass over
// the logits is enough for a row without filters.
//
// A row is drawn from as argmax of (x - m) + Gumbel noise, m the largest x, both sums rounded. The
// scan does not know m yet, so it looks for the largest x + noise instead, and for the second one:
// where they are further apart than rounding can matter the winner is the same. Where they are not
// the row is read again (about once in 10,000 rows).
#pragma once

#include "common/gumbel_scan.cuh"
#include "common/threshold.cuh"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

constexpr int64_t kShortestSlice = 4096;  // elements; below that the ticket costs more than the row
constexpr int64_t kBlocksWanted = 512;    // a few for every multiprocessor of today's largest GPUs
constexpr int64_t kSliceUnit = 64;        // keeps slices as aligned as their row

// How rows are cut so that few rows still fill the GPU. The cuts change nothing in the result.
struct Slices {
  int64_t count;
  int64_t length;

  Slices(int64_t rows, int64_t vocab) {
    const int64_t wanted = (kBlocksWanted + rows - 1) / rows;
    const int64_t useful = (vocab + kShortestSlice - 1) / kShortestSlice;
    count = wanted < useful ? wanted : useful;
    count = count < kThreads ? count : kThreads;  // one thread each merges them
    length = ((vocab + count - 1) / count + kSliceUnit - 1) / kSliceUnit * kSliceUnit;
    count = (vocab + length - 1) / length;
  }
  // As many slices of other rows; the last ones may be empty.
  Slices cut(int64_t vocab) const {
    Slices other = *this;
    other.length = ((vocab + count - 1) / count + kSliceUnit - 1) / kSliceUnit * kSliceUnit;
    return other;
  }
};

// What is known of a slice, and merged of a row.
struct Scanned {
  Key extreme;  // of the largest logit, NaN aside; 0: nothing above -infinity
  Key drawn;    // of the largest x + noise; 0: nothing
  float second;
  uint32_t has_nan;
};

__device__ inline Scanned merged(Key extreme, bool has_nan, Key drawn, float own_second) {
  Scanned result;
  result.extreme = reduce_block<Largest>(extreme);
  result.drawn = reduce_block<Largest>(drawn);
  const float best = drawn == 0 ? -kInfinity : key_value(drawn);
  result.second = reduce_block<Largest>(drawn == result.drawn ? own_second : best);
  result.has_nan = __syncthreads_or(has_nan);
  return result;
}

// draws: noise is wanted too.
template <class Row>
__device__ Scanned scan_slice(const Row& row, int64_t begin, int64_t end, float temperature,
                              bool draws, const Noise& noise) {
  constexpr int kPack = Row::kPack;
  const Scale scale(temperature, 0.0f);
  GumbelScan scan(noise, GumbelScan::new_floor());
  float largest = -kInfinity;
  int64_t id = 0;
  bool has_nan = false;
  row.each_pack(begin, end, [&](const float (&x)[kPack], int64_t first) {
    const float highest = highest_of(x);
    has_nan = has_nan || highest != highest;  // its row is decided without a draw
    if (!(highest <= largest)) {
#pragma unroll
      for (int j = kPack - 1; j >= 0; --j) {
        id = x[j] > largest && x[j] == highest ? first + j : id;
      }
      largest = highest > largest ? highest : largest;
    }
    if (draws)
      scan.see<kPack>(scale.scaled_bound(highest), first,
                      [&](int j) { return scale.scaled(pick(x, j)); });
  });
  const Key extreme = largest == -kInfinity ? 0 : to_key(largest, id);
  return merged(extreme, has_nan, scan.key(), scan.second());
}

__device__ inline void store_scanned(Scanned* to, const Scanned& scanned) {
  if (threadIdx.x == 0) *to = scanned;
}

__device__ inline Scanned merge_slices(const Scanned* slices, int64_t count) {
  Scanned own = {0, 0, -kInfinity, 0};
  if (threadIdx.x < count) {
    const Scanned* from = slices + threadIdx.x;
    own = {__ldcg(&from->extreme), __ldcg(&from->drawn), __ldcg(&from->second),
           __ldcg(&from->has_nan)};
  }
  return merged(own.extreme, own.has_nan != 0, own.drawn, own.second);
}

// The lowest id of the largest finite logit, or 0: what a row with NaN falls back to.
template <class Row>
__device__ int64_t find_largest_finite(const Row& row) {
  Key best = 0;
  row.each_pack(0, row.size(), [&](const float (&x)[Row::kPack], int64_t first) {
#pragma unroll
    for (int j = 0; j < Row::kPack; ++j)
      if (x[j] > -kInfinity && x[j] < kInfinity)
        best = Largest::of(best, Key(to_key(x[j], first + j)));
  });
  best = reduce_block<Largest>(best);
  return best == 0 ? 0 : key_index(best);
}

// What a row is drawn from; `decided` rows have one possible token.
struct Distribution {
  bool decided;
  int32_t status;
  int64_t token;
  Scale scale;
  float threshold;  // tokens of at least this value are kept
};

template <class Row>
__device__ Distribution distribution_of(const Row& row, const Scanned& scanned,
                                        const SamplingArrays& sampling, int64_t b) {
  const float largest = scanned.extreme == 0 ? -kInfinity : key_value(scanned.extreme);
  Distribution result = {false, kRowOk, 0, Scale(1.0f, 0.0f), kLowestFinite};
  result.token = scanned.extreme == 0 ? 0 : key_index(scanned.extreme);
  result.status = scanned.has_nan ? kRowNan : scanned.extreme == 0 ? kRowEmpty : kRowOk;
  if (scanned.has_nan) result.token = find_largest_finite(row);
  result.decided = !(sampling.temperature[b] > 0.0f) || result.status != kRowOk;
  if (result.decided) return result;
  result.scale = Scale(sampling.temperature[b], largest);
  if (result.scale.largest == -kInfinity) {
    result.status = kRowEmpty;
    result.decided = true;
    return result;
  }
  result.threshold =
      kept_threshold(row, result.scale, sampling.top_k[b], sampling.top_p[b], sampling.min_p[b]);
  return result;
}

// The key of the drawn token among the kept ones of begin .. end; 0 where there are none.
template <class Row>
__device__ Key draw_kept(const Row& row, const Scale& scale, float threshold, const Noise& noise,
                         int64_t begin, int64_t end) {
  constexpr int kPack = Row::kPack;
  GumbelScan scan(noise, GumbelScan::new_floor());
  row.each_pack(begin, end, [&](const float (&x)[kPack], int64_t first) {
    scan.see<kPack>(scale.value_bound(highest_of(x)), first, [&](int j) {
      const float value = scale.value(pick(x, j));
      return value >= threshold ? value : -kInfinity;
    });
  });
  return reduce_block<Largest>(scan.key());
}

// Whether rounding cannot have changed the winner: 2^-24 of every intermediate result, of which
// x - m and the noise are below 30 where it matters, twice over for both totals.
SPECDEC_INLINE bool is_clear(const Scanned& scanned, float largest) {
  if (scanned.drawn == 0 || !(fabsf(largest) < kInfinity)) return false;
  const float margin = (80.0f + fabsf(largest)) * 0x1p-22f;
  return key_value(scanned.drawn) - scanned.second > margin;
}

// The draw of a whole row.
template <class Row>
__device__ int64_t draw(const Row& row, const Scanned& scanned, const Distribution& from,
                        const Noise& noise) {
  if (from.decided) return from.token;
  if (is_clear(scanned, from.scale.largest)) {
    const int64_t winner = key_index(scanned.drawn);
    if (from.scale.value(row.value(winner)) >= from.threshold) return winner;
  }
  const Key drawn = draw_kept(row, from.scale, from.threshold, noise, 0, row.size());
  return drawn == 0 ? from.token : key_index(drawn);  // bounds overflow where only one token counts
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
