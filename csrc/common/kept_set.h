// top_k, top_p and min_p as one exact threshold on a row.
#pragma once

#include "common/threshold.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// Slots of thread_scratch.
constexpr int kListScratch = 8;
constexpr int kBetweenScratch = 10;

// ---- few tokens: listed once, then filtered without looking at the row again

// More than this many are not worth a list.
inline int64_t longest_list(int64_t vocab) { return vocab / 8 + 512; }

// Lists the tokens of value `floor` and above. An empty list when there are too many, or no memory.
template <class Source>
TokenList list_tokens(Row<Source> row, float floor) {
  const int64_t most = longest_list(row.size);
  char* memory = static_cast<char*>(thread_scratch(kListScratch, size_t(most + kLanes) * 8));
  TokenList list;
  if (memory == nullptr) return list;
  list.ids = reinterpret_cast<int32_t*>(memory);
  list.listed = reinterpret_cast<float*>(list.ids + most + kLanes);
  for (int64_t start = 0; start < row.size; start += kStride) {
    if (row.is_below(start, floor)) continue;
    if (list.size + kStride > most) return TokenList();
    each_vector_of_stride(start, row.size,
                          [&](int64_t first, int64_t end) __attribute__((always_inline)) {
                            const F32 some = row.values(first, end);
                            list.append(some >= floor, first, some);
                          });
  }
  list.pad();
  return list;
}

// Keeps what reaches the threshold.
inline void shorten(KeptSet& kept) {
  TokenList& list = kept.list;
  int64_t left = 0;
  for (int64_t i = 0; i < list.size; ++i) {
    list.ids[left] = list.ids[i];
    list.listed[left] = list.listed[i];
    left += list.listed[i] >= kept.threshold;
  }
  list.size = left;
  list.pad();
}

// top_p within the list. False when memory runs out.
inline bool shorten_to_mass(int64_t vocab, double target, KeptSet& kept) {
  const Found found = find_threshold<Weight::mass>(kept.list, vocab, target, 0, kept);
  shorten(kept);
  return found != Found::out_of_memory;
}

// The k-th largest stride bounds the k-th largest element from below. False when memory runs out;
// kept.list stays empty where listing does not pay.
template <class Source>
bool list_top_k(const Row<Source>& row, int64_t top_k, KeptSet& kept) {
  if (row.strides == nullptr || top_k > num_strides(row.size)) return true;
  const StrideValues<Source> strides(row);
  KeptSet bound = kept;
  Found found = find_threshold<Weight::one>(strides, row.size, double(top_k), 0, bound);
  if (found == Found::out_of_memory) return false;
  kept.list = list_tokens(row, bound.threshold);
  if (!kept.is_listed()) return true;
  found = find_threshold<Weight::one>(kept.list, row.size, double(top_k), 0, kept);
  shorten(kept);
  return found != Found::out_of_memory;
}

// False when memory runs out.
template <class Source>
bool filter_top_k(const Row<Source>& row, int32_t top_k, KeptSet& kept) {
  if (!list_top_k(row, top_k, kept)) return false;
  if (kept.is_listed()) return true;
  return find_threshold<Weight::one>(row, row.size, double(top_k), 0, kept) != Found::out_of_memory;
}

// ---- the mass of a row that is spread over many tokens

// Values between which the threshold of a share of the mass probably lies.
struct Bracket {
  float floor, ceiling;
};

// Judges by every kSampled-th stride. `near` is the mass of `near_floor` and above, which is known.
template <class Source>
Bracket guess_bracket(const Row<Source>& row, double share, float least, float near_floor,
                      int64_t near) {
  constexpr int64_t kSampled = 16;
  constexpr double kError = 0.02;  // of the mass
  WeightHistogram<Weight::mass> histogram(row.size);
  const auto add = [&](F32 values, I32 counted) __attribute__((always_inline)) {
    histogram.add(values, counted & (values < near_floor));
  };
  least = least > kNegligible ? least : kNegligible;
  int64_t sampled = 0;
  for (int64_t start = 0; start < row.size; start += kSampled * kStride) {
    const int64_t end = start + kStride < row.size ? start + kStride : row.size;
    each_vector(row, least, start, end, add);
    sampled += end - start;
  }
  const double part = double(sampled) / double(row.size);
  const double total = double(near) * part + double(histogram.total());
  const double target = share * total - double(near) * part;
  Bracket bracket = {least, near_floor};
  int64_t above = 0;
  int bin;
  if (histogram.crosses(target - kError * total, above, bin) && bin > 0)
    bracket.ceiling = lower_bound(bin - 1) < near_floor ? lower_bound(bin - 1) : near_floor;
  above = 0;
  if (histogram.crosses(target + kError * total, above, bin))
    bracket.floor = lower_bound(bin) > least ? lower_bound(bin) : least;
  return bracket;
}

// One pass: the whole mass, that of the bracket's ceiling and above, and a list of the values in
// between.
struct Split {
  int64_t total, above;
  ArrayValues between;
};

template <class Source>
Split split_row(const Row<Source>& row, float least, const Bracket& bracket, float* between) {
  const float scale = power_of_two(mass_bits(row.size));
  MassSum total, above;
  int64_t size = 0;
  const auto add = [&](F32 values, I32 counted) __attribute__((always_inline)) {
    const F32 weights = select(counted, exp_in_range(values) * scale, F32{});
    const I32 high = values >= bracket.ceiling;
    total.add(weights);
    above.add(select(high, weights, F32{}));
    size += compress(~high & (values >= bracket.floor), values, between + size);
  };
  each_vector(row, least > kNegligible ? least : kNegligible, 0, row.size, add);
  store(between + size, broadcast(-kInfinity));
  return {total.total(), above.total(), {between, size}};
}

// The tokens near the maximum often hold enough. Where they are many or too little, the threshold
// is guessed and looked for where the guess says, and everywhere only if it is not there. False
// when memory runs out.
template <class Source>
bool filter_top_p(const Row<Source>& row, double share, KeptSet& kept) {
  constexpr float kNear = -6.0f;
  if (kept.is_listed())
    return shorten_to_mass(row.size, share * double(total_mass(row, kept)), kept);
  const float least = kept.threshold, near_floor = least > kNear ? least : kNear;
  kept.list = list_tokens(row, near_floor);
  const bool listed = kept.is_listed();
  const int64_t near = listed ? total_mass(row, kept) : 0;
  if (listed && kept.list.size < row.size / 64) {
    const double target = share * double(mass_above(row, least, row.size, 0, row.size));
    if (!(double(near) < target)) return shorten_to_mass(row.size, target, kept);
  }
  auto* between = static_cast<float*>(
      thread_scratch(kBetweenScratch, size_t(row.size + 2 * kLanes) * sizeof(float)));
  if (between == nullptr) return false;
  const Bracket bracket = guess_bracket(row, share, least, listed ? near_floor : kInfinity, near);
  const Split split = split_row(row, least, bracket, between);
  const double target = share * double(split.total);
  if (listed && !(double(near) < target)) return shorten_to_mass(row.size, target, kept);
  Found found = Found::no;
  if (double(split.above) < target)
    found = find_threshold<Weight::mass>(split.between, row.size, target, split.above, kept);
  if (found == Found::no) found = find_threshold<Weight::mass>(row, row.size, target, 0, kept);
  kept.list = list_tokens(row, kept.threshold);
  return found != Found::out_of_memory;
}

// In transformers' order: top_k, top_p, min_p. Ties at a threshold are kept, the largest always is.
// False when memory runs out.
template <class Source>
bool find_kept_set(const Row<Source>& row, int32_t top_k, float top_p, float min_p, KeptSet& kept) {
  if (top_k > 0 && top_k < row.size && !filter_top_k(row, top_k, kept)) return false;
  if (top_p < 1.0f && !filter_top_p(row, double(top_p), kept)) return false;
  if (min_p > 0.0f) {
    const float floor = log_(min_p < 1.0f ? min_p : 1.0f);
    kept.threshold = floor > kept.threshold ? floor : kept.threshold;
    if (kept.is_listed())
      shorten(kept);
    else
      kept.list = list_tokens(row, kept.threshold);
  }
  return true;
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
