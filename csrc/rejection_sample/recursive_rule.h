// The rule `recursive`, and `token`, which is the same on chains: siblings are tried in slot order,
// each accepted with min(1, p/q); after a rejection p becomes norm(max(p - q, 0)) and q loses the
// tried token (Leviathan et al., "Fast inference from transformers via speculative decoding", 2023;
// Jeon et al., "Recursive speculative decoding", 2024). Without draft logits q is one-hot.
#pragma once

#include "rejection_sample/probabilities.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

template <class Rows>
class RecursiveRule : Verification {
  using Source = typename Rows::Source;

 public:
  RecursiveRule(const RejectionSampleParams& p, const Rows& logits, int64_t b)
      : Verification(p, b), logits_(logits) {}

  // False when memory runs out.
  bool run() {
    int64_t slot = window_.num_nodes > 0 ? 0 : -1;
    position_ = p_.sampling.position[b_];
    while (slot >= 0) {
      bool ok = true;
      Target<Source> target = target_at(logits_, slot, ok);
      int64_t accepted = -1, token = target.token();
      int32_t status = target.distribution.status;
      if (target.decided())
        accepted = window_.child_with_token(slot, token);
      else
        ok = ok && decide(target, slot, accepted, token, status);
      if (!ok) return false;
      result_.append(slot, token, status);
      slot = accepted;
      ++position_;
    }
    result_.finish();
    return true;
  }

 private:
  Noise noise(uint32_t stream) const { return Noise(p_.sampling.seed[b_], position_, stream); }
  float coin_of(int64_t slot) const { return coin(noise(kAcceptStream), uint32_t(slot)); }

  bool decide(Target<Source>& target, int64_t slot, int64_t& accepted, int64_t& token,
              int32_t& status) {
    if (window_.next_child(slot, slot) < 0) {
      token = target.draw_from_all(noise(kBonusStream));
      return true;
    }
    target.find_total();
    if (p_.draft == nullptr) return against_one_hot(target, slot, accepted, token);
    Draft draft;
    if (!read_draft(p_, b_, slot, draft)) return false;
    status |= draft.status;
    if (draft.status == kRowOk) return against(target, draft, slot, accepted, token);
    token = target.draw_from_all(noise(kResidualStream));
    return true;
  }

  bool against(Target<Source>& target, Draft& draft, int64_t slot, int64_t& accepted,
               int64_t& token) {
    const int64_t first_child = window_.next_child(slot, slot);
    token = window_.tokens[first_child];
    if (accepts(first_child, draft.probability(token), target.probability(token))) {
      accepted = first_child;
      return true;
    }
    const auto left = [&](int64_t first) {
      return vmax(target.probabilities(first) - draft.vector(first), broadcast(0.0f));
    };
    const int64_t second = window_.next_child(slot, first_child);
    if (second < 0) {
      token = draw_residual(target, noise(kResidualStream), left);
      return true;
    }
    return against_siblings(target, draft, left, slot, first_child, accepted, token);
  }

  // The siblings behind a rejected one. What is left of p lies in memory from here on.
  template <class Left>
  bool against_siblings(Target<Source>& target, Draft& draft, Left first_left, int64_t slot,
                        int64_t rejected, int64_t& accepted, int64_t& token) {
    const int64_t vocab = target.row.size;
    auto* p = static_cast<float*>(
        thread_scratch(kResidualScratch, size_t(vocab + kLanes) * sizeof(float)));
    if (p == nullptr) return false;
    float p_total = 1.0f, q_total = 1.0f;
    const auto keep = [&](auto left) {
      return mass_as_float(sum_of_masses(vocab,
                                         [&](int64_t first) {
                                           const F32 some = left(first);
                                           store(p + first, some);
                                           return some;
                                         }),
                           mass_bits(vocab));
    };
    const auto left = [&](int64_t first) {
      return vmax(load(p + first) / p_total - draft.vector(first) / q_total, broadcast(0.0f));
    };
    int64_t q_mass = sum_of_masses(draft.size, [&](int64_t first) { return draft.vector(first); });
    float p_next = keep(first_left);
    for (int64_t child = rejected;;) {
      const int64_t tried = window_.tokens[child];
      if (tried >= 0 && tried < draft.size) {
        q_mass -= to_mass(draft.q[tried], power_of_two(mass_bits(draft.size)));
        draft.q[tried] = 0.0f;
      }
      p_total = p_next;
      q_total = mass_as_float(q_mass, mass_bits(draft.size));
      child = window_.next_child(slot, child);
      if (child < 0 || p_total == 0.0f || q_total == 0.0f) break;
      token = window_.tokens[child];
      const float target_left = token >= 0 && token < vocab ? p[token] / p_total : 0.0f;
      if (accepts(child, draft.probability(token) / q_total, target_left)) {
        accepted = child;
        return true;
      }
      p_next = keep(left);
    }
    token = draw_residual(target, noise(kResidualStream),
                          [&](int64_t first) { return load_upto(p + first, vocab - first, 0.0f); });
    return true;
  }

  bool accepts(int64_t child, float q, float p) const { return coin_of(child) * q < p; }

  bool against_one_hot(Target<Source>& target, int64_t slot, int64_t& accepted, int64_t& token) {
    auto* rejected = static_cast<int64_t*>(
        thread_scratch(kRejectedScratch, size_t(p_.window.width) * sizeof(int64_t)));
    if (rejected == nullptr) return false;
    const KeptSet& kept = target.distribution.kept;
    const int bits = mass_bits(target.row.size);
    int64_t num_rejected = 0, left = total_mass(target.row, kept);
    for (int64_t child = window_.next_child(slot, slot); child >= 0;
         child = window_.next_child(slot, child)) {
      const int64_t x = window_.tokens[child];
      if (x < 0 || x >= target.row.size || contains(rejected, num_rejected, x)) continue;
      const float value = target.row.value(x);
      if (!kept.has(value)) continue;
      if (accepts(child, 1.0f, exp_(value) / mass_as_float(left, bits))) {
        accepted = child;
        token = x;
        return true;
      }
      rejected[num_rejected++] = x;
      left -= to_mass(exp_(value), power_of_two(bits));
    }
    const Noise residual = noise(kResidualStream);
    token = draw_kept(target.row, kept, residual, 0, target.row.size, rejected, num_rejected).id;
    if (token < 0) token = target.draw_from_all(residual);
    return true;
  }

  static bool contains(const int64_t* list, int64_t size, int64_t token) {
    for (int64_t i = 0; i < size; ++i)
      if (list[i] == token) return true;
    return false;
  }

  const Rows& logits_;
  int64_t position_ = 0;
};

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
