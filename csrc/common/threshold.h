// The value at which the weight of all larger ones crosses a target, without sorting.
//
// top_k and top_p both ask for it: the weight is a count, or a mass. A histogram over coarse bins
// finds the bin that holds it, a radix search over that bin's elements finds the value. Weights are
// integers, so nothing depends on the order of summation.
#pragma once

#include "common/rows.h"
#include "common/top_keys.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

constexpr int kCandidateScratch = 1;  // slot of thread_scratch

enum class Weight { one, mass };

// Weights by bin, bin 0 holding the largest values. Behind the bins are places for lanes that do
// not count, one each, as additions to the same place wait for each other.
template <int kBins>
struct Histogram {
  int64_t bins[kBins + kLanes];

  void clear() {
    for (int64_t& bin : bins) bin = 0;
  }
  int64_t total() const {
    int64_t sum = 0;
    for (int bin = 0; bin < kBins; ++bin) sum += bins[bin];
    return sum;
  }
  // The last bin in use whose weight above is below target, but at least the first one in use; adds
  // the weight of the bins before it to `above`. Whether the bins up to it reach the target.
  bool crosses(double target, int64_t& above, int& chosen) const {
    chosen = -1;
    int64_t sum = above;
    for (int bin = 0; bin < kBins; ++bin) {
      if (bins[bin] == 0) continue;
      if (chosen >= 0 && !(double(sum) < target)) break;
      chosen = bin;
      above = sum;
      sum += bins[bin];
    }
    return chosen >= 0 && !(double(sum) < target);
  }
};

struct Candidate {
  uint32_t key;  // orders as the value does
  int64_t weight;
};

// The value among `list` where the weight, `above` before the largest, crosses the target.
inline float refine(Candidate* list, int64_t size, double target, int64_t above) {
  Histogram<256> histogram;
  uint32_t key = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    histogram.clear();
    for (int64_t i = 0; i < size; ++i)
      histogram.bins[255u - (list[i].key >> shift & 255u)] += list[i].weight;
    int chosen;
    histogram.crosses(target, above, chosen);
    const uint32_t digit = 255u - uint32_t(chosen);
    key |= digit << shift;
    int64_t left = 0;
    for (int64_t i = 0; i < size; ++i)
      if ((list[i].key >> shift & 255u) == digit) list[left++] = list[i];
    size = left;
  }
  return from_ordered_key(key);
}

// Coarse bins of width 1/64 below the maximum; the last one takes the rest.
constexpr int kCoarseBins = 2048;
SPECDEC_INLINE I32 coarse_bins(F32 values) {
  const F32 scaled = values * -64.0f;
  return __builtin_convertvector(select(scaled < 2047.0f, scaled, broadcast(2047.0f)), I32);
}
// Values of the bin are at least this, and below the bound of the bin before.
inline float lower_bound(int bin) {
  return bin < kCoarseBins - 1 ? float(bin + 1) * -0x1p-6f : -kInfinity;
}

// The weights of values, masses of a row of `vocab` tokens, by coarse bin.
template <Weight kWeight>
struct WeightHistogram : Histogram<kCoarseBins> {
  float scale;

  explicit WeightHistogram(int64_t vocab) : scale(power_of_two(mass_bits(vocab))) { clear(); }

  SPECDEC_INLINE void add(F32 values, I32 counted) {
    const I32 at = select(counted, coarse_bins(values), first_lanes(kCoarseBins));
    if (kWeight == Weight::one) {
      for (int lane = 0; lane < kLanes; ++lane) ++bins[at[lane]];
      return;
    }
    const Masses masses(select(counted, exp_in_range(values) * scale, F32{}));
    for (int lane = 0; lane < kLanes / 2; ++lane) {
      bins[at[lane]] += int64_t(masses.low[lane] - Masses::kExcess);
      bins[at[lane + kLanes / 2]] += int64_t(masses.high[lane] - Masses::kExcess);
    }
  }
};

// What a search reads besides a Row or a TokenList: an array, whole vectors of it.
struct ArrayValues {
  const float* data;
  int64_t size;

  SPECDEC_INLINE F32 values(int64_t first, int64_t) const { return load(data + first); }
  bool is_below(int64_t, float) const { return false; }
};

// The largest value of every stride.
template <class Source>
struct StrideValues {
  Row<Source> row;
  int64_t size;

  explicit StrideValues(const Row<Source>& of) : row(of), size(num_strides(of.size)) {}
  SPECDEC_INLINE F32 values(int64_t first, int64_t) const {
    return row.values_of(load_upto(row.strides + first, size - first));
  }
  bool is_below(int64_t, float) const { return false; }
};

// Calls visit(values, counted) for the vectors of begin..end in which some reach the floor.
template <class Values, class Visit>
SPECDEC_INLINE void each_vector(Values some, float floor, int64_t begin, int64_t end, Visit visit) {
  for (int64_t start = begin; start < end; start += kStride) {
    if (some.is_below(start, floor)) continue;
    each_vector_of_stride(start, end,
                          [&](int64_t first, int64_t stop) __attribute__((always_inline)) {
                            const F32 values = some.values(first, stop);
                            const I32 counted = values >= floor;
                            if (any(counted)) visit(values, counted);
                          });
  }
}

enum class Found { yes, no, out_of_memory };

// Searches Values for the smallest one whose larger ones weigh less than a target: `above`, and
// those among the Values. What is below a floor does not count.
template <Weight kWeight, class Values>
class ThresholdSearch {
 public:
  ThresholdSearch(const Values& values, int64_t vocab, double target, float floor, int64_t above)
      : values_(values),
        target_(target),
        floor_(kWeight == Weight::mass && floor < kNegligible ? kNegligible : floor),
        above_(above),
        histogram_(vocab) {}

  // Not found: all of them together do not reach the target.
  Found run(float& threshold) {
    fill();
    int chosen;
    if (!histogram_.crosses(target_, above_, chosen)) return Found::no;
    const size_t room = size_t(values_.size + kLanes);
    auto* list = static_cast<Candidate*>(
        thread_scratch(kCandidateScratch, room * (sizeof(Candidate) + sizeof(float))));
    if (list == nullptr) return Found::out_of_memory;
    auto* found = reinterpret_cast<float*>(list + room);
    const int64_t size = list_bin(chosen, found, threshold);
    for (int64_t i = 0; i < size; ++i) {
      list[i].key = ordered_key(found[i]);
      list[i].weight = kWeight == Weight::mass ? to_mass(exp_(found[i]), histogram_.scale) : 1;
    }
    if (size > 0) threshold = refine(list, size, target_, above_);
    return Found::yes;
  }

 private:
  // Complete down to the bin where the target is crossed: once a part of the values reaches the
  // target, smaller ones of the rest can't matter.
  void fill() {
    const auto add = [&](F32 values, I32 counted)
                         __attribute__((always_inline)) { histogram_.add(values, counted); };
    for (int64_t begin = 0, size = 4096; begin < values_.size; begin += size, size *= 2) {
      const int64_t end = begin + size < values_.size ? begin + size : values_.size;
      each_vector(values_, floor_, begin, end, add);
      int64_t above = above_;
      int bin;
      if (end == values_.size || !histogram_.crosses(target_, above, bin)) continue;
      floor_ = lower_bound(bin) > floor_ ? lower_bound(bin) : floor_;
    }
  }

  // Lists the values of a bin; none when all are the same, as 16-bit logits often are: that one is
  // `only` then.
  int64_t list_bin(int bin, float* found, float& only) {
    F32 smallest = broadcast(kInfinity), largest = broadcast(-kInfinity);
    int64_t size = 0;
    const auto add = [&](F32 values, I32 counted) __attribute__((always_inline)) {
      counted &= coarse_bins(values) == bin;
      if (!any(counted)) return;
      size += compress(counted, values, found + size);
      largest = select(counted & (values > largest), values, largest);
      smallest = select(counted & (values < smallest), values, smallest);
    };
    each_vector(values_, floor_, 0, values_.size, add);
    only = reduce_max(largest);
    return -reduce_max(-smallest) == only ? 0 : size;
  }

  const Values& values_;
  double target_;
  float floor_;
  int64_t above_;
  WeightHistogram<kWeight> histogram_;
};

// Raises kept.threshold where it is found.
template <Weight kWeight, class Values>
Found find_threshold(const Values& values, int64_t vocab, double target, int64_t above,
                     KeptSet& kept) {
  ThresholdSearch<kWeight, Values> search(values, vocab, target, kept.threshold, above);
  return search.run(kept.threshold);
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
