// The rule `token` for one row of the batch: accept with min(1, p/q), else draw the recovered token
// from norm(max(p - q, 0)) (Leviathan et al., "Fast inference from transformers via speculative
// decoding", 2023). Without draft logits q is one-hot, and siblings are tried in slot order, each
// against the target without those already rejected.
#pragma once

#include "common/decide.h"
#include "rejection_sample/rejection_sample.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// Slots of thread_scratch.
constexpr int kDraftScratch = 3;
constexpr int kRejectedScratch = 4;

// Writes softmax(logits) to q[vocab], each draft id at its target id, and returns the row's status.
// A row with NaN, or with nothing finite, writes nothing.
template <class T>
int32_t draft_probabilities(const T* logits, int64_t draft_vocab, const int64_t* vocab_map,
                            float* q, int64_t vocab) {
  const Extreme extreme = find_extreme(logits, 0, draft_vocab);
  if (extreme.has_nan) return kRowNan;
  if (extreme.largest == -kInfinity) return kRowEmpty;
  const Row<T> row(logits, draft_vocab, 1.0f, extreme.largest);
  const float total = mass_as_float(total_mass(row, KeptSet()), mass_bits(draft_vocab));
  for (int64_t id = 0; id < vocab; ++id) q[id] = 0.0f;
  for (int64_t first = 0; first < draft_vocab; first += kLanes) {
    const F32 probability = exp_(row.values(first)) / total;
    const int64_t left = draft_vocab - first;
    for (int lane = 0; lane < (left < kLanes ? int(left) : kLanes); ++lane) {
      const int64_t id = vocab_map == nullptr ? first + lane : vocab_map[first + lane];
      if (id >= 0 && id < vocab) q[id] = probability[lane];
    }
  }
  return kRowOk;
}

template <class T>
class TokenRule {
 public:
  TokenRule(const RejectionSampleParams& p, int64_t b)
      : p_(p), b_(b), window_(p.window, b), result_(p.acceptance, p.window.width, b) {}

  // False when memory runs out.
  bool run() {
    int64_t slot = window_.num_nodes > 0 ? 0 : -1;
    position_ = p_.sampling.position[b_];
    while (slot >= 0) {
      const T* logits =
          static_cast<const T*>(p_.target) + b_ * p_.target_stride_b + slot * p_.target_stride_t;
      const Extreme extreme = find_extreme(logits, 0, p_.vocab);
      const Row<T> row(logits, p_.vocab, p_.sampling.temperature[b_], extreme.largest);
      target_ = Distribution();
      if (!distribution_of(row, extreme, p_.sampling, b_, target_)) return false;
      int64_t token = target_.token, accepted = -1;
      if (target_.decided) {
        accepted = window_.child_with_token(slot, token);
      } else if (!decide(row, slot, accepted, token)) {
        return false;
      }
      result_.append(slot, token, target_.status);
      slot = accepted;
      ++position_;
    }
    result_.finish();
    return true;
  }

 private:
  Noise noise(uint32_t stream) const { return Noise(p_.sampling.seed[b_], position_, stream); }

  bool decide(const Row<T>& row, int64_t slot, int64_t& accepted, int64_t& token) {
    const int64_t child = window_.next_child(slot, slot);
    if (child < 0) {
      token = draw_kept(row, target_.kept, noise(kBonusStream), 0, row.size).id;
      return true;
    }
    if (p_.draft == nullptr) return against_one_hot(row, slot, accepted, token);
    auto* q = static_cast<float*>(thread_scratch(kDraftScratch, size_t(row.size) * sizeof(float)));
    if (q == nullptr) return false;
    const int32_t draft_status = read_draft(slot, q);
    target_.status |= draft_status;
    if (draft_status == kRowOk) {
      against(row, child, q, accepted, token);
    } else {
      token = draw_kept(row, target_.kept, noise(kResidualStream), 0, row.size).id;
    }
    return true;
  }

  int32_t read_draft(int64_t slot, float* q) const {
    const int64_t offset = b_ * p_.draft_stride_b + slot * p_.draft_stride_t;
    const auto read = [&](const auto* logits) {
      return draft_probabilities(logits + offset, p_.draft_vocab, p_.draft_vocab_map, q, p_.vocab);
    };
    if (p_.draft_dtype == DType::bf16) return read(static_cast<const BFloat16*>(p_.draft));
    if (p_.draft_dtype == DType::f16) return read(static_cast<const Half*>(p_.draft));
    return read(static_cast<const float*>(p_.draft));
  }

  bool is_candidate(const Row<T>& row, int64_t token) const {
    return token >= 0 && token < row.size && target_.kept.has(row.value(token));
  }

  void against(const Row<T>& row, int64_t child, const float* q, int64_t& accepted,
               int64_t& token) const {
    const float total = mass_as_float(total_mass(row, target_.kept), mass_bits(row.size));
    const int64_t x = window_.tokens[child];
    if (is_candidate(row, x) &&
        coin(noise(kAcceptStream), uint32_t(child)) * q[x] < exp_(row.value(x)) / total) {
      accepted = child;
      token = x;
      return;
    }
    token = draw_residual(row, total, q);
    if (token < 0) token = draw_kept(row, target_.kept, noise(kResidualStream), 0, row.size).id;
  }

  // -1 when max(p - q, 0) is 0 everywhere.
  int64_t draw_residual(const Row<T>& row, float total, const float* q) const {
    GumbelScan scan(noise(kResidualStream), nullptr, 0);
    for (int64_t first = 0; first < row.size; first += kBlock) {
      F32 scores[4];
      for (int j = 0; j < 4; ++j) {
        const int64_t at = first + j * kLanes;
        const F32 values = row.values(at);
        const F32 draft = load_upto(q + at, row.size - at);
        scores[j] = broadcast(-kInfinity);
        const I32 mask = target_.kept.mask(values);
        if (!any(mask)) continue;
        const F32 left = vmax(exp_(values) / total - draft, broadcast(0.0f));
        scores[j] = log_(select(mask, left, broadcast(0.0f)));
      }
      scan.block(scores, first);
    }
    return scan.best().id;
  }

  bool against_one_hot(const Row<T>& row, int64_t slot, int64_t& accepted, int64_t& token) {
    auto* rejected = static_cast<int64_t*>(
        thread_scratch(kRejectedScratch, size_t(p_.window.width) * sizeof(int64_t)));
    if (rejected == nullptr) return false;
    const int bits = mass_bits(row.size);
    const float scale = power_of_two(bits);
    int64_t num_rejected = 0, left = total_mass(row, target_.kept);
    for (int64_t child = window_.next_child(slot, slot); child >= 0;
         child = window_.next_child(slot, child)) {
      const int64_t x = window_.tokens[child];
      if (!is_candidate(row, x) || contains(rejected, num_rejected, x)) continue;
      const float weight = exp_(row.value(x));
      if (coin(noise(kAcceptStream), uint32_t(child)) < weight / mass_as_float(left, bits)) {
        accepted = child;
        token = x;
        return true;
      }
      rejected[num_rejected++] = x;
      left -= to_mass(weight, scale);
    }
    const Noise residual = noise(kResidualStream);
    token = draw_kept(row, target_.kept, residual, 0, row.size, rejected, num_rejected).id;
    if (token < 0) token = draw_kept(row, target_.kept, residual, 0, row.size).id;
    return true;
  }

  static bool contains(const int64_t* list, int64_t size, int64_t token) {
    for (int64_t i = 0; i < size; ++i)
      if (list[i] == token) return true;
    return false;
  }

  const RejectionSampleParams& p_;
  int64_t b_;
  Window window_;
  AcceptanceRow result_;
  int64_t position_ = 0;
  Distribution target_;
};

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
