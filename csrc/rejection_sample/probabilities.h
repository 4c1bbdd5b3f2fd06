// Target and draft probabilities at one node.
#pragma once

#include "common/decide.h"
#include "rejection_sample/rejection_sample.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// Slots of thread_scratch.
constexpr int kDraftScratch = 3;
constexpr int kRejectedScratch = 4;
constexpr int kResidualScratch = 6;
constexpr int kStrideScratch = 7;
constexpr int kWeightScratch = 9;

// What the target may emit after a node; one-hot where that is decided.
template <class Source>
class Target {
 public:
  Target(const Source& logits, float temperature, const Extreme& extreme, const float* strides)
      : row(logits, temperature, extreme.largest, strides), distribution() {}

  Row<Source> row;
  Distribution distribution;

  bool decided() const { return distribution.decided; }
  int64_t token() const { return distribution.token; }
  // Call before asking for probabilities. keeps_weights: they will be asked for more than once.
  void find_total(bool keeps_weights = false) {
    if (decided()) return;
    if (keeps_weights && !distribution.kept.is_listed())
      weights_ = static_cast<float*>(
          thread_scratch(kWeightScratch, size_t(row.size + kLanes) * sizeof(float)));
    const int64_t mass = weights_ == nullptr ? total_mass(row, distribution.kept) : keep_weights();
    total_ = mass_as_float(mass, mass_bits(row.size));
  }
  SPECDEC_INLINE F32 probabilities(int64_t first) {
    if (decided()) return one_hot(token(), first);
    if (weights_ != nullptr) return load_upto(weights_ + first, row.size - first, 0.0f) / total_;
    const F32 values = row.values(first);
    const I32 kept = distribution.kept.mask(values);
    if (!any(kept)) return broadcast(0.0f);
    return select(kept, exp_(values) / total_, broadcast(0.0f));
  }
  float probability(int64_t id) const {
    if (id < 0 || id >= row.size) return 0.0f;
    if (decided()) return id == token() ? 1.0f : 0.0f;
    const float value = row.value(id);
    return distribution.kept.has(value) ? exp_(value) / total_ : 0.0f;
  }
  int64_t draw_from_all(const Noise& noise) const {
    return decided() ? token() : draw_kept(row, distribution.kept, noise, 0, row.size).id;
  }

  static SPECDEC_INLINE F32 one_hot(int64_t token, int64_t first) {
    F32 result = broadcast(0.0f);
    if (token >= first && token < first + kLanes) result[token - first] = 1.0f;
    return result;
  }

 private:
  int64_t keep_weights() {
    return sum_of_masses(row.size, [&](int64_t first) {
      const F32 values = row.values(first);
      const F32 weights = select(distribution.kept.mask(values), exp_(values), broadcast(0.0f));
      store(weights_ + first, weights);
      return weights;
    });
  }

  float total_ = 1.0f;
  float* weights_ = nullptr;
};

// Draws from the residual that `left(first)` gives, from the whole target when that is empty.
template <class Source, class Left>
int64_t draw_residual(const Target<Source>& target, const Noise& noise, Left left) {
  if (target.decided()) return target.token();
  const auto scores = [&](int64_t first) { return log_(left(first)); };
  const int64_t token = draw(noise, 0, target.row.size, scores).id;
  return token >= 0 ? token : target.draw_from_all(noise);
}

// The draft probabilities of a node's children, on the target's ids.
struct Draft {
  float* q = nullptr;
  int64_t size = 0;  // without a map the larger of both vocabularies
  int32_t status = kRowOk;

  // 0 beyond the end.
  SPECDEC_INLINE F32 vector(int64_t first) const {
    return load_upto(q + first, size - first, 0.0f);
  }
  float probability(int64_t id) const { return id >= 0 && id < size ? q[id] : 0.0f; }
};

// Writes softmax(logits) to draft.q. A row with NaN, or with nothing finite, writes nothing.
template <class T>
void read_draft_row(const T* logits, int64_t vocab, const int64_t* map, Draft& draft) {
  const PlainSource<T> source(logits, vocab);
  const Extreme extreme = find_extreme(source, 0, vocab);
  draft.status = extreme.has_nan ? kRowNan : extreme.largest == -kInfinity ? kRowEmpty : kRowOk;
  if (draft.status != kRowOk) return;
  Row<PlainSource<T>> row(source, 1.0f, extreme.largest);
  for (int64_t id = map == nullptr ? vocab : 0; id < draft.size; ++id) draft.q[id] = 0.0f;
  const int64_t mass = sum_of_masses(vocab, [&](int64_t first) {
    const F32 values = row.values(first);
    const F32 weights = select(KeptSet().mask(values), exp_(values), broadcast(0.0f));
    const int64_t left = vocab - first;
    if (map == nullptr && left >= kLanes) {
      store(draft.q + first, weights);
      return weights;
    }
    for (int lane = 0; lane < (left < kLanes ? int(left) : kLanes); ++lane) {
      const int64_t id = map == nullptr ? first + lane : map[first + lane];
      if (id >= 0 && id < draft.size) draft.q[id] = weights[lane];
    }
    return weights;
  });
  const float total = mass_as_float(mass, mass_bits(vocab));
  int64_t id = 0;
  for (; id + kLanes <= draft.size; id += kLanes) store(draft.q + id, load(draft.q + id) / total);
  for (; id < draft.size; ++id) draft.q[id] = draft.q[id] / total;
}

// False when memory runs out.
inline bool read_draft(const RejectionSampleParams& p, int64_t b, int64_t slot, Draft& draft) {
  const bool mapped = p.draft_vocab_map != nullptr;
  draft.size = mapped || p.vocab > p.draft_vocab ? p.vocab : p.draft_vocab;
  draft.q = static_cast<float*>(thread_scratch(kDraftScratch, size_t(draft.size) * sizeof(float)));
  if (draft.q == nullptr) return false;
  const int64_t offset = b * p.draft_stride_b + slot * p.draft_stride_t;
  const Status status = with_element(p.draft_dtype, [&](auto element) {
    const auto* logits = static_cast<const decltype(element)*>(p.draft) + offset;
    read_draft_row(logits, p.draft_vocab, p.draft_vocab_map, draft);
    return Status::ok;
  });
  return status == Status::ok;
}

// What the rules share: one row of the batch, and what is accepted of it.
class Verification {
 protected:
  Verification(const RejectionSampleParams& p, int64_t b)
      : p_(p), b_(b), window_(p.window, b), result_(p.acceptance, p.window.width, b) {}

  // The target after a slot; ok is false when memory runs out.
  template <class Rows>
  Target<typename Rows::Source> target_at(const Rows& logits, int64_t slot, bool& ok) const {
    const auto source = logits.source(b_, slot);
    const int64_t strides = num_strides(logits.vocab());
    auto* maxima =
        static_cast<float*>(thread_scratch(kStrideScratch, size_t(strides) * sizeof(float)));
    const Extreme extreme = find_extreme(source, 0, logits.vocab(), maxima);
    Target<typename Rows::Source> target(source, p_.sampling.temperature[b_], extreme, maxima);
    ok = distribution_of(target.row, extreme, p_.sampling, b_, target.distribution);
    return target;
  }

  const RejectionSampleParams& p_;
  int64_t b_;
  Window window_;
  AcceptanceRow result_;
};

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
