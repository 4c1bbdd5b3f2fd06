// Target and draft probabilities after one slot.
#pragma once

#include "rejection_sample/nodes.cuh"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// run(source), the draft's logits after a slot.
template <class Run>
__device__ void with_draft_row(const Arguments& a, int64_t b, int64_t slot, Run run) {
  switch (a.params.draft_dtype) {
    case DType::bf16:
      return run(Source<BFloat16>(a.draft, b, slot));
    case DType::f16:
      return run(Source<Half>(a.draft, b, slot));
    default:
      return run(Source<float>(a.draft, b, slot));
  }
}

// The target: kept tokens have exp(value) / total, a decided row has one of probability 1.
template <class Row>
struct Target {
  const Row& row;
  const Node& node;

  __device__ float probability_of(float logit, int64_t id) const {
    if (node.decided) return id == node.token ? 1.0f : 0.0f;
    const float value = node.scale.value(logit);
    return value >= node.threshold ? exp_(value) / node.total : 0.0f;
  }
  __device__ float probability(int64_t id) const {
    return id < 0 || id >= row.size() ? 0.0f : probability_of(row.value(id), id);
  }
};

// The draft on the target's ids; one-hot at `token` without draft logits.
class Draft {
 public:
  __device__ Draft(const Arguments& a, const Node& node, int64_t b, int64_t slot, int64_t token)
      : a_(a),
        offset_(b * a.draft.stride_b + slot * a.draft.stride_t),
        scale_(1.0f, node.draft_largest),
        total_(node.draft_total),
        token_(token) {}

  // Without a map the larger of both vocabularies.
  __device__ int64_t size() const {
    const bool mapped = a_.params.draft_vocab_map != nullptr;
    return mapped ? a_.params.vocab : max(a_.params.vocab, a_.draft.vocab);
  }
  __device__ float probability(int64_t id) const {
    if (!a_.has_draft()) return id == token_ ? 1.0f : 0.0f;
    if (id < 0 || id >= size()) return 0.0f;
    const int64_t at = a_.space.inverse_map == nullptr ? id : a_.space.inverse_map[id] - 1;
    return at < 0 || at >= a_.draft.vocab ? 0.0f : probability_of(logit(at));
  }
  __device__ float probability_of(float draft_logit) const {
    const float value = scale_.value(draft_logit);
    return value >= kLowestFinite ? exp_(value) / total_ : 0.0f;
  }

 private:
  __device__ float logit(int64_t at) const {
    switch (a_.params.draft_dtype) {
      case DType::bf16:
        return to_float(static_cast<const BFloat16*>(a_.draft.logits)[offset_ + at]);
      case DType::f16:
        return to_float(static_cast<const Half*>(a_.draft.logits)[offset_ + at]);
      default:
        return static_cast<const float*>(a_.draft.logits)[offset_ + at];
    }
  }

  const Arguments& a_;
  int64_t offset_;
  Scale scale_;
  float total_;
  int64_t token_;
};

// What rejected children have left of the target: each took the draft, as it stood then, away.
struct Left {
  const Round* rounds;
  int32_t count;

  __device__ float of(float target, float draft, int64_t id) const {
    for (int32_t i = 0; i < count; ++i) {
      const float taken = target / rounds[i].target_total - draft / rounds[i].draft_total;
      target = taken > 0.0f ? taken : 0.0f;
      if (rounds[i].tried == id) draft = 0.0f;
    }
    return target;
  }
};

// What block verification draws from after a slot.
SPECDEC_INLINE float block_left(float weight, float target, float draft) {
  const float left = weight * target - draft;
  return left > 0.0f ? left : 0.0f;
}

// visit(j, id, probability) for the tokens of a pack that the target gives any chance, in one copy
// of the code; the target is not decided.
template <class Row, class Visit>
SPECDEC_INLINE void each_target(const Target<Row>& target, const float (&x)[Row::kPack],
                                int64_t first, Visit visit) {
#pragma unroll 1
  for (int j = 0; j < Row::kPack; ++j) {
    const float probability = target.probability_of(pick(x, j), first + j);
    if (probability > 0.0f) visit(j, first + j, probability);
  }
}

// The sum of weight(id, target probability) over the vocabulary, in fixed point; the weight of an
// impossible token is 0. All threads of the block call.
template <class Row, class WeightOf>
__device__ float sum_over_target(const Target<Row>& target, WeightOf weight) {
  const int bits = mass_bits(target.row.size());
  const float mass_scale = power_of_two(bits);
  if (target.node.decided)
    return mass_as_float(to_mass(weight(target.node.token, 1.0f), mass_scale), bits);
  Key sum = 0;
  target.row.each_pack(0, target.row.size(), [&](const float (&x)[Row::kPack], int64_t first) {
    each_target(target, x, first, [&](int, int64_t id, float probability) {
      sum += Key(to_mass(weight(id, probability), mass_scale));
    });
  });
  return mass_as_float(static_cast<int64_t>(reduce_block<Sum>(sum)), bits);
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
