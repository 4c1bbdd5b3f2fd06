// The rule `typical`, lossy: a token stands when p > min(threshold, alpha exp(-entropy of p)), and
// the deepest node that stands is kept (Cai et al., "Medusa", 2024).
#pragma once

#include "rejection_sample/probabilities.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

template <class Rows>
class TypicalRule : Verification {
  using Source = typename Rows::Source;

 public:
  TypicalRule(const RejectionSampleParams& p, const Rows& logits, int64_t b)
      : Verification(p, b), logits_(logits) {}

  // False when memory runs out.
  bool run() {
    if (window_.num_nodes > 0 && !(find_depths() && emit())) return false;
    result_.finish();
    return true;
  }

 private:
  // Levels below the root of every slot that stands, -1 for the others.
  bool find_depths() {
    depths_ = static_cast<int32_t*>(
        thread_scratch(kRejectedScratch, size_t(p_.window.width) * 3 * sizeof(int32_t)));
    if (depths_ == nullptr) return false;
    for (int64_t slot = 1; slot < window_.num_nodes; ++slot) depths_[slot] = -1;
    depths_[0] = 0;
    for (int64_t slot = 0; slot < window_.num_nodes; ++slot) {
      if (depths_[slot] < 0) continue;
      if (depths_[slot] > depths_[best_]) best_ = slot;
      int64_t child = window_.next_child(slot, slot);
      if (child < 0) continue;
      bool ok = true;
      Target<Source> target = target_at(logits_, slot, ok);
      if (!ok) return false;
      statuses()[slot] = target.distribution.status;
      target.find_total();
      const float lowest = bound(target);
      for (; child >= 0; child = window_.next_child(slot, child))
        if (target.probability(window_.tokens[child]) > lowest) depths_[child] = depths_[slot] + 1;
    }
    return true;
  }

  float bound(Target<Source>& target) const {
    float entropy = 0.0f;
    if (!target.decided()) {
      const int64_t vocab = target.row.size;
      const int bits = mass_bits(vocab);
      const float total = mass_as_float(total_mass(target.row, target.distribution.kept), bits);
      const int64_t spread = sum_of_masses(vocab, [&](int64_t first) {
        const F32 values = target.row.values(first);
        const I32 kept = target.distribution.kept.mask(values);
        return select(kept, exp_(values) * -values, broadcast(0.0f));
      });
      entropy = log_(total) + mass_as_float(spread, bits) / total;
    }
    const float scaled = p_.posterior_alpha * exp_(-entropy);
    return scaled < p_.posterior_threshold ? scaled : p_.posterior_threshold;
  }

  bool emit() {
    int32_t* path = depths_ + p_.window.width;
    const int64_t depth = depths_[best_];
    for (int64_t slot = best_, i = depth; i >= 0; --i, slot = window_.parents[slot])
      path[i] = int32_t(slot);
    for (int64_t i = 0; i < depth; ++i)
      result_.append(path[i], window_.tokens[path[i + 1]], statuses()[path[i]]);
    bool ok = true;
    Target<Source> last = target_at(logits_, best_, ok);
    if (!ok) return false;
    const Noise noise(p_.sampling.seed[b_], p_.sampling.position[b_] + depth, kBonusStream);
    result_.append(best_, last.draw_from_all(noise), last.distribution.status);
    return true;
  }

  // Of slots with children that stand.
  int32_t* statuses() const { return depths_ + 2 * p_.window.width; }

  const Rows& logits_;
  int32_t* depths_ = nullptr;
  int64_t best_ = 0;
};

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
