// top_k, top_p and min_p as one exact threshold on a row, without sorting the vocabulary.
//
// top_k and top_p ask the same question: the smallest value such that the weight (a count, or a
// mass) of all larger values is below a target. A histogram over coarse bins finds the bin that
// holds it, a radix search over that bin's elements finds the value. Weights are integers, so
// nothing depends on the order of summation.
#pragma once

#include "common/rows.h"
#include "common/top_keys.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

constexpr int kCandidateScratch = 1;  // slot of thread_scratch

struct Candidate {
  uint32_t key;  // orders as the value does
  int64_t weight;
};

// Weights and counts by bin, bin 0 holding the largest values.
template <int kBins>
struct Histogram {
  struct Bin {
    int64_t weight;
    int64_t count;
  };
  Bin bins[kBins];

  void clear() {
    for (Bin& bin : bins) bin = Bin{0, 0};
  }
  void add(int bin, int64_t weight) {
    bins[bin].weight += weight;
    ++bins[bin].count;
  }
  // The last bin in use whose weight above is below target, but at least the first one in use.
  // Adds the weight of the bins before it to `above`.
  int crossing(double target, int64_t& above) const {
    int chosen = -1;
    int64_t sum = above;
    for (int bin = 0; bin < kBins; ++bin) {
      if (bins[bin].count == 0) continue;
      if (chosen >= 0 && !(double(sum) < target)) break;
      chosen = bin;
      above = sum;
      sum += bins[bin].weight;
    }
    return chosen;
  }
};

inline float refine(Candidate* list, int64_t size, double target, int64_t above) {
  Histogram<256> histogram;
  uint32_t key = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    histogram.clear();
    for (int64_t i = 0; i < size; ++i)
      histogram.add(255 - int(list[i].key >> shift & 255u), list[i].weight);
    const uint32_t digit = uint32_t(255 - histogram.crossing(target, above));
    key |= digit << shift;
    int64_t left = 0;
    for (int64_t i = 0; i < size; ++i)
      if ((list[i].key >> shift & 255u) == digit) list[left++] = list[i];
    size = left;
  }
  return from_ordered_key(key);
}

enum class Weight { one, mass };

// Coarse bins of width 1/64 below the maximum; the last one takes the rest.
constexpr int kCoarseBins = 2048;
SPECDEC_INLINE I32 coarse_bin(F32 values) {
  const F32 scaled = values * -64.0f;
  return __builtin_convertvector(select(scaled < 2047.0f, scaled, broadcast(2047.0f)), I32);
}

// Calls visit(bin, value, weight) for the kept elements begin..end of weight above 0; with only_bin
// at least 0, for those of that bin.
template <Weight kWeight, class Source, class Visit>
SPECDEC_INLINE void visit_weights(Row<Source> row, const KeptSet& kept, int64_t begin, int64_t end,
                                  int only_bin, Visit visit) {
  const float scale = power_of_two(mass_bits(row.size));
  // Below this an element's mass rounds to 0 for every vocabulary.
  const float negligible = kWeight == Weight::mass ? -29.0f : -kInfinity;
  for (int64_t i = begin; i < end; i += kLanes) {
    const F32 values = row.values(i);
    I32 mask = kept.mask(values) & (values > negligible);
    if (!any(mask)) continue;
    const I32 bins = coarse_bin(values);
    if (only_bin >= 0) mask &= bins == only_bin;
    if (!any(mask)) continue;
    I64 weights = {};
    if (kWeight == Weight::mass) weights = to_mass(exp_(values), scale);
    for (int lane = 0; lane < kLanes; ++lane)
      if (mask[lane]) visit(bins[lane], values[lane], kWeight == Weight::one ? 1 : weights[lane]);
  }
}

// Fills the histogram of the kept elements, complete down to the bin where `target` is crossed:
// once a part of the row reaches the target, smaller elements of the rest can't matter.
template <Weight kWeight, class Source>
void fill_histogram(const Row<Source>& row, double target, KeptSet kept,
                    Histogram<kCoarseBins>& histogram) {
  histogram.clear();
  int64_t total = 0;
  for (int64_t begin = 0, size = 4096; begin < row.size; begin += size, size *= 2) {
    const int64_t end = begin + size < row.size ? begin + size : row.size;
    visit_weights<kWeight>(row, kept, begin, end, -1, [&](int32_t bin, float, int64_t weight) {
      histogram.add(bin, weight);
      total += weight;
    });
    if (total == 0 || double(total) < target) continue;
    int64_t above = 0;
    const int bin = histogram.crossing(target, above);
    const float bound = bin < kCoarseBins - 1 ? float(bin + 1) * -0x1p-6f : -kInfinity;
    kept.threshold = bound > kept.threshold ? bound : kept.threshold;
  }
}

// The smallest value whose larger ones weigh less than `target`, a share of the total for masses.
// Only elements of `kept` count. False when memory runs out.
template <Weight kWeight, class Source>
bool find_threshold(const Row<Source>& row, double target, KeptSet& kept) {
  if (kWeight == Weight::mass) target *= double(total_mass(row, kept));
  Histogram<kCoarseBins> histogram;
  fill_histogram<kWeight>(row, target, kept, histogram);
  int64_t above = 0;
  const int chosen = histogram.crossing(target, above);
  const int64_t size = histogram.bins[chosen].count;
  auto* list =
      static_cast<Candidate*>(thread_scratch(kCandidateScratch, size_t(size) * sizeof(Candidate)));
  if (list == nullptr) return false;
  int64_t filled = 0;
  visit_weights<kWeight>(row, kept, 0, row.size, chosen, [&](int32_t, float value, int64_t weight) {
    list[filled++] = Candidate{ordered_key(value), weight};
  });
  kept.threshold = refine(list, size, target, above);
  return true;
}

// In transformers' order: top_k, top_p, min_p. Ties at a threshold are kept, the largest always is.
template <class Source>
bool find_kept_set(const Row<Source>& row, int32_t top_k, float top_p, float min_p, KeptSet& kept) {
  if (top_k > 0 && top_k < row.size && !find_threshold<Weight::one>(row, double(top_k), kept))
    return false;
  if (top_p < 1.0f && !find_threshold<Weight::mass>(row, double(top_p), kept)) return false;
  if (min_p > 0.0f) {
    const float floor = log_(min_p < 1.0f ? min_p : 1.0f);
    kept.threshold = floor > kept.threshold ? floor : kept.threshold;
  }
  return true;
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
