// The value at which the weight of all larger ones crosses a target, without sorting: what
// csrc/common/threshold.h finds, by one block, which reads the row twice (more often only when
// thousands of different values share a bin). Weights are integers: no order changes their sum.
#pragma once

#include "common/masses.h"
#include "common/source.cuh"
#include "common/top_keys.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

enum class Weight { one, mass };

constexpr float kLowestFinite = -0x1.fffffep+127f;
constexpr int kCoarseBins = 2048;  // of width 1/64 below the maximum; the last one takes the rest
constexpr int kDigits = 256;
constexpr int kListed = 2048;

SPECDEC_INLINE int coarse_bin(float value) {
  const float scaled = value * -64.0f;
  return static_cast<int>(scaled < 2047.0f ? scaled : 2047.0f);
}

SPECDEC_INLINE Key weight_of(Weight weight, float value, float mass_scale) {
  return weight == Weight::one ? Key(1) : Key(to_mass(exp_(value), mass_scale));
}

struct Crossing {
  int bin;     // the first one in use where the sum reaches the target; -1: none does
  Key before;  // the sum of the bins before it
};

// Bin 0 comes first, on top of `before`. By one warp; its result is for all threads.
template <int kBins>
__device__ Crossing find_crossing(const Key* bins, Key before, double target) {
  SPECDEC_SHARED(Crossing, found);
  constexpr int kOwn = kBins / 32;
  if (threadIdx.x < 32) {
    const Key* own = bins + threadIdx.x * kOwn;
    Key sum = 0;
    for (int i = 0; i < kOwn; ++i) sum += own[i];
    Key through = sum;
    for (int step = 1; step < 32; step *= 2) {
      const Key lower = __shfl_up_sync(kAllLanes, through, step);
      if (threadIdx.x >= static_cast<unsigned>(step)) through += lower;
    }
    through += before;
    const bool reaches = sum != 0 && !(static_cast<double>(through) < target);
    const unsigned lanes = __ballot_sync(kAllLanes, reaches);
    if (threadIdx.x == 0 && lanes == 0) found.bin = -1;
    if (lanes != 0 && static_cast<int>(threadIdx.x) == __ffs(static_cast<int>(lanes)) - 1) {
      Key above = through - sum;
      int bin = 0;
      while (own[bin] == 0 || static_cast<double>(above + own[bin]) < target) above += own[bin++];
      found.bin = static_cast<int>(threadIdx.x) * kOwn + bin;
      found.before = above;
    }
  }
  __syncthreads();
  const Crossing result = found;
  __syncthreads();
  return result;
}

// The keys of the values in one coarse bin: listed, or where they are too many found again in the
// row whenever they are wanted.
struct BinKeys {
  uint32_t keys[kListed];
  unsigned size;
  uint32_t lowest, highest;
};

template <class Row, class Visit>
__device__ void each_value(const Row& row, const Scale& scale, float floor, Visit visit) {
  row.each_pack(0, row.size(), [&](const float (&x)[Row::kPack], int64_t) {
#pragma unroll
    for (int j = 0; j < Row::kPack; ++j) {
      const float value = scale.value(x[j]);
      if (value >= floor) visit(value);
    }
  });
}

template <class Row>
__device__ void list_bin(const Row& row, const Scale& scale, float floor, int bin, BinKeys& found) {
  if (threadIdx.x == 0) found.size = 0, found.lowest = ~0u, found.highest = 0;
  __syncthreads();
  each_value(row, scale, floor, [&](float value) {
    if (coarse_bin(value) != bin) return;
    const uint32_t key = ordered_key(value);
    const unsigned at = atomicAdd(&found.size, 1u);
    if (at < kListed) found.keys[at] = key;
    if (key < found.lowest) atomicMin(&found.lowest, key);
    if (key > found.highest) atomicMax(&found.highest, key);
  });
  __syncthreads();
}

struct SearchSpace {
  Key bins[kCoarseBins];
  BinKeys found;
};

// The value within a bin, by its digits from the highest on.
template <class Row>
__device__ float refine(Weight by, const Row& row, const Scale& scale, float floor, int bin,
                        SearchSpace& space, Key before, double target) {
  Key* bins = space.bins;
  const BinKeys& found = space.found;
  const float mass_scale = power_of_two(mass_bits(row.size()));
  uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < kDigits; i += kThreads) bins[i] = 0;
    __syncthreads();
    const auto add = [&](uint32_t key) {
      if (shift < 24 && key >> (shift + 8) != prefix) return;
      const Key weight = weight_of(by, from_ordered_key(key), mass_scale);
      atomicAdd(bins + (255u - (key >> shift & 255u)), weight);
    };
    if (found.size <= kListed) {
      for (unsigned i = threadIdx.x; i < found.size; i += kThreads) add(found.keys[i]);
    } else {
      each_value(row, scale, floor, [&](float value) {
        if (coarse_bin(value) == bin) add(ordered_key(value));
      });
    }
    __syncthreads();
    const Crossing crossing = find_crossing<kDigits>(bins, before, target);
    prefix = prefix << 8 | (255u - static_cast<uint32_t>(crossing.bin));
    before = crossing.before;
  }
  return from_ordered_key(prefix);
}

// The smallest value of `floor` and above whose larger ones weigh less than `wanted`: a count, or a
// share of all their mass. `floor` when all of them together do not reach it.
template <class Row>
__device__ float raise_threshold(Weight by, const Row& row, const Scale& scale, float floor,
                                 double wanted, SearchSpace& space) {
  Key* bins = space.bins;
  const float lowest = by == Weight::mass && floor < kNegligible ? kNegligible : floor;
  const float mass_scale = power_of_two(mass_bits(row.size()));
  __syncthreads();
  for (int i = threadIdx.x; i < kCoarseBins; i += kThreads) bins[i] = 0;
  __syncthreads();
  Key total = 0;
  each_value(row, scale, lowest, [&](float value) {
    const Key weight = weight_of(by, value, mass_scale);
    atomicAdd(bins + coarse_bin(value), weight);
    total += weight;
  });
  if (by == Weight::mass) wanted = wanted * static_cast<double>(reduce_block<Sum>(total));
  __syncthreads();
  const Crossing crossing = find_crossing<kCoarseBins>(bins, 0, wanted);
  if (crossing.bin < 0) return floor;
  list_bin(row, scale, lowest, crossing.bin, space.found);
  if (space.found.lowest == space.found.highest) return from_ordered_key(space.found.lowest);
  return refine(by, row, scale, lowest, crossing.bin, space, crossing.before, wanted);
}

// In transformers' order: top_k, top_p, min_p. What is left are the values of at least the result;
// ties at a threshold are kept, the largest always is.
template <class Row>
__device__ float kept_threshold(const Row& row, const Scale& scale, int32_t top_k, float top_p,
                                float min_p) {
  SPECDEC_SHARED(SearchSpace, space);
  float threshold = kLowestFinite;
  if (top_k > 0 && top_k < row.size())
    threshold = raise_threshold(Weight::one, row, scale, threshold, top_k, space);
  if (top_p < 1.0f) threshold = raise_threshold(Weight::mass, row, scale, threshold, top_p, space);
  if (min_p > 0.0f) {
    const float floor = log_(min_p < 1.0f ? min_p : 1.0f);
    threshold = floor > threshold ? floor : threshold;
  }
  return threshold;
}

// The mass of all values of `floor` and above, in fixed point and as a float.
template <class Row>
__device__ int64_t kept_mass(const Row& row, const Scale& scale, float floor) {
  const float mass_scale = power_of_two(mass_bits(row.size()));
  Key sum = 0;
  each_value(row, scale, floor < kNegligible ? kNegligible : floor,
             [&](float value) { sum += weight_of(Weight::mass, value, mass_scale); });
  return static_cast<int64_t>(reduce_block<Sum>(sum));
}
template <class Row>
__device__ float total_mass(const Row& row, const Scale& scale, float floor) {
  return mass_as_float(kept_mass(row, scale, floor), mass_bits(row.size()));
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
