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

// Slots of thread_scratch.
constexpr int kCandidateScratch = 1;
constexpr int kListScratch = 8;

// Below this an element's mass rounds to 0 for every vocabulary.
constexpr float kNegligible = -29.0f;

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

inline Candidate* candidates(int64_t size) {
  return static_cast<Candidate*>(
      thread_scratch(kCandidateScratch, size_t(size) * sizeof(Candidate)));
}

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
  const float negligible = kWeight == Weight::mass ? kNegligible : -kInfinity;
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
  Candidate* list = candidates(size);
  if (list == nullptr) return false;
  int64_t filled = 0;
  visit_weights<kWeight>(row, kept, 0, row.size, chosen, [&](int32_t, float value, int64_t weight) {
    list[filled++] = Candidate{ordered_key(value), weight};
  });
  kept.threshold = refine(list, size, target, above);
  return true;
}

// ---- few tokens: listed once, then filtered without looking at the row again

// More than this many are not worth a list.
inline int64_t longest_list(int64_t vocab) { return vocab / 8 + 512; }

// Lists the tokens of value `floor` and above: only strides whose largest one is are read. An empty
// list when there are too many, or no memory.
template <class Source>
TokenList list_tokens(Row<Source> row, float floor) {
  const int64_t most = longest_list(row.size);
  char* memory = static_cast<char*>(thread_scratch(kListScratch, size_t(most + kLanes) * 8));
  TokenList list;
  if (memory == nullptr) return list;
  auto* ids = reinterpret_cast<int32_t*>(memory);
  auto* values = reinterpret_cast<float*>(ids + most + kLanes);
  for (int64_t start = 0; start < row.size; start += kStride) {
    if (!(row.value_of(row.strides[start / kStride]) >= floor)) continue;
    const int64_t stop = start + kStride < row.size ? start + kStride : row.size;
    for (int64_t first = start; first < stop; first += kLanes) {
      const F32 some = row.values(first);
      if (!any(some >= floor)) continue;
      if (list.size + kLanes > most) return TokenList();
      for (int lane = 0; lane < kLanes; ++lane) {
        ids[list.size] = int32_t(first + lane);
        values[list.size] = some[lane];
        list.size += some[lane] >= floor;
      }
    }
  }
  list.ids = ids;
  list.values = values;
  list.pad();
  return list;
}

// Keeps what reaches the threshold.
inline void shorten(KeptSet& kept) {
  int64_t left = 0;
  for (int64_t i = 0; i < kept.list.size; ++i) {
    kept.list.ids[left] = kept.list.ids[i];
    kept.list.values[left] = kept.list.values[i];
    left += kept.list.values[i] >= kept.threshold;
  }
  kept.list.size = left;
  kept.list.pad();
}

// The k-th largest stride bounds the k-th largest element from below. False when memory runs out;
// kept.list stays empty where listing does not pay.
template <class Source>
bool list_top_k(const Row<Source>& row, int64_t top_k, KeptSet& kept) {
  const int64_t strides = num_strides(row.size);
  if (row.strides == nullptr || top_k > strides) return true;
  Candidate* some = candidates(strides);
  if (some == nullptr) return false;
  for (int64_t i = 0; i < strides; ++i)
    some[i] = Candidate{ordered_key(row.value_of(row.strides[i])), 1};
  const float floor = refine(some, strides, double(top_k), 0);
  kept.list = list_tokens(row, floor > kept.threshold ? floor : kept.threshold);
  if (!kept.is_listed()) return true;
  some = candidates(kept.list.size);
  if (some == nullptr) return false;
  for (int64_t i = 0; i < kept.list.size; ++i)
    some[i] = Candidate{ordered_key(kept.list.values[i]), 1};
  kept.threshold = refine(some, kept.list.size, double(top_k), 0);
  shorten(kept);
  return true;
}

// top_p within the list. False when memory runs out.
inline bool shorten_to_mass(int64_t vocab, double target, KeptSet& kept) {
  Candidate* some = candidates(kept.list.size);
  if (some == nullptr) return false;
  const float scale = power_of_two(mass_bits(vocab));
  int64_t size = 0;
  for (int64_t i = 0; i < kept.list.size; ++i) {
    const float value = kept.list.values[i];
    if (value > kNegligible) some[size++] = {ordered_key(value), to_mass(exp_(value), scale)};
  }
  kept.threshold = refine(some, size, target, 0);
  shorten(kept);
  return true;
}

// Lists the tokens near the maximum, further ones when these hold too little mass. False when
// memory runs out; kept.list stays empty where listing does not pay.
template <class Source>
bool list_top_p(const Row<Source>& row, double share, KeptSet& kept) {
  if (row.strides == nullptr) return true;
  const double target = share * double(total_mass(row, kept));
  const float floors[] = {-6.0f, -12.0f, kNegligible};
  for (const float floor : floors) {
    kept.list = list_tokens(row, floor);
    if (!kept.is_listed()) return true;
    if (double(total_mass(kept.list, row.size)) < target) continue;
    return shorten_to_mass(row.size, target, kept);
  }
  kept.list = TokenList();
  return true;
}

// In transformers' order: top_k, top_p, min_p. Ties at a threshold are kept, the largest always is.
// False when memory runs out.
template <class Source>
bool find_kept_set(const Row<Source>& row, int32_t top_k, float top_p, float min_p, KeptSet& kept) {
  if (top_k > 0 && top_k < row.size) {
    if (!list_top_k(row, top_k, kept)) return false;
    if (!kept.is_listed() && !find_threshold<Weight::one>(row, double(top_k), kept)) return false;
  }
  if (top_p < 1.0f && kept.is_listed()) {
    const double target = double(top_p) * double(total_mass(kept.list, row.size));
    if (!shorten_to_mass(row.size, target, kept)) return false;
  } else if (top_p < 1.0f) {
    if (top_k <= 0 && !list_top_p(row, double(top_p), kept)) return false;
    if (!kept.is_listed() && !find_threshold<Weight::mass>(row, double(top_p), kept)) return false;
  }
  if (min_p > 0.0f) {
    const float floor = log_(min_p < 1.0f ? min_p : 1.0f);
    kept.threshold = floor > kept.threshold ? floor : kept.threshold;
    if (kept.is_listed())
      shorten(kept);
    else if (row.strides != nullptr)
      kept.list = list_tokens(row, kept.threshold);
  }
  return true;
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
