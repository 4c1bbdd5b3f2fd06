// The rule `block`: a chain is accepted as a whole (Sun et al., "Block verification accelerates
// speculative decoding", 2024). With w_0 = 1 and w_i = min(w_{i-1} p(x_i) / q(x_i), 1), node i
// stands with probability m_i / (m_i + 1 - w_i), m_i the mass of max(w_i p - q, 0), and the last
// node with w_i. The draft is kept up to the last node that stands, then max(w p - q, 0) is drawn
// from.
//
// Coins of nodes behind the end were looked at, so the numbers are counted by step: position's
// would come back in the next step.
#pragma once

#include "rejection_sample/probabilities.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

template <class Rows>
class BlockRule : Verification {
  using Source = typename Rows::Source;

 public:
  BlockRule(const RejectionSampleParams& p, const Rows& logits, int64_t b)
      : Verification(p, b), logits_(logits) {}

  // False when memory runs out.
  bool run() {
    if (window_.num_nodes > 0 && !(find_last() && emit())) return false;
    result_.finish();
    return true;
  }

 private:
  // The draft of a slot's child: a row of probabilities, one-hot, or none.
  struct Child {
    bool exists = false;
    int64_t token = -1;
    Draft draft;

    SPECDEC_INLINE F32 vector(int64_t first) const {
      return draft.q != nullptr ? draft.vector(first) : Target<Source>::one_hot(token, first);
    }
    float probability() const { return draft.q != nullptr ? draft.probability(token) : 1.0f; }
  };

  Noise noise(uint32_t stream) const {
    return Noise(p_.sampling.seed[b_], p_.sampling.step[b_], stream);
  }

  // False when memory runs out.
  bool read_child(int64_t slot, Child& child) {
    child.exists = slot + 1 < window_.num_nodes;
    if (!child.exists) return true;
    child.token = window_.tokens[slot + 1];
    if (p_.draft == nullptr) return true;
    if (!read_draft(p_, b_, slot, child.draft)) return false;
    status_ |= child.draft.status;
    child.exists = child.draft.status == kRowOk;
    return true;
  }

  bool find_last() {
    float weight = 1.0f;
    for (int64_t slot = 0;; ++slot) {
      bool ok = true;
      Target<Source> target = target_at(logits_, slot, ok);
      Child child;
      if (!ok || !read_child(slot, child)) return false;
      status_ |= target.distribution.status;
      target.find_total(slot > 0);
      if (slot == 0 ||
          coin(noise(kAcceptStream), uint32_t(slot)) < likelihood(target, child, weight)) {
        last_ = slot;
        last_weight_ = weight;
      }
      if (!child.exists) return true;
      const float joint = weight * target.probability(child.token);
      if (joint == 0.0f) return true;
      weight = joint >= child.probability() ? 1.0f : joint / child.probability();
    }
  }

  static SPECDEC_INLINE F32 left(Target<Source>& target, const Child& child, float weight,
                                 int64_t first) {
    return vmax(weight * target.probabilities(first) - child.vector(first), broadcast(0.0f));
  }

  // That a node stands.
  static float likelihood(Target<Source>& target, const Child& child, float weight) {
    if (!child.exists || weight >= 1.0f) return weight;
    const int64_t vocab = target.row.size;
    const float mass = mass_as_float(
        sum_of_masses(vocab, [&](int64_t first) { return left(target, child, weight, first); }),
        mass_bits(vocab));
    return mass / (mass + (1.0f - weight));
  }

  bool emit() {
    bool ok = true;
    Target<Source> target = target_at(logits_, last_, ok);
    Child child;
    if (!ok || !read_child(last_, child)) return false;
    target.find_total();
    for (int64_t slot = 0; slot < last_; ++slot)
      result_.append(slot, window_.tokens[slot + 1], status_);
    const int64_t token =
        child.exists
            ? draw_residual(target, noise(kResidualStream),
                            [&](int64_t first) { return left(target, child, last_weight_, first); })
            : target.draw_from_all(noise(kBonusStream));
    result_.append(last_, token, status_);
    return true;
  }

  const Rows& logits_;
  int32_t status_ = kRowOk;
  int64_t last_ = 0;
  float last_weight_ = 1.0f;
};

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
