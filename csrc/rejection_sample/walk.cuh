// The second part of verification: one block walks a window, asking for scalars, and leaves the
// token that is still to be drawn to the last kernel. All its threads take the same way.
#pragma once

#include "rejection_sample/scan.cuh"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// `coupled`: the target has drawn at every node, and the child that drafted its token is followed.
__device__ inline void walk_coupled(const Arguments& a, int64_t b) {
  AcceptanceWriter result(a.params, b);
  int64_t slot = 0;
  while (slot >= 0) {
    const Node node = load_node(a, b, slot);
    result.append(slot, node.token, node.status);
    slot = child_with_token(a.params.window, b, slot, node.token);
  }
  result.finish();
}

// The other rules.
template <class T>
class Walk {
  using Row = Source<T>;

 public:
  __device__ Walk(const Arguments& a, int64_t b)
      : a_(a),
        b_(b),
        window_(a.params.window),
        rounds_(a.space.rounds + b * a.params.window.width),
        result_(a.params, b) {}

  __device__ void run() {
    switch (a_.params.rule) {
      case Rule::block:
        block();
        break;
      case Rule::typical:
        typical();
        break;
      default:
        recursive();
    }
    result_.finish();
  }

 private:
  // ---- recursive: siblings in turn, each against what the rejected ones have left

  __device__ void recursive() {
    int64_t slot = 0;
    while (slot >= 0) {
      const Node node = load_node(a_, b_, slot);
      int64_t token = node.token, accepted;
      int32_t status = node.status;
      if (node.decided)
        accepted = child_with_token(window_, b_, slot, token);
      else
        accepted = decide(node, slot, token, status);
      result_.append(slot, token, status);
      slot = accepted;
    }
  }

  __device__ int64_t position() const { return a_.params.sampling.position[b_] + result_.length(); }
  __device__ bool accepts(int64_t child, float draft, float target) const {
    const Noise noise = noise_at(a_, b_, position(), kAcceptStream);
    return coin(noise, static_cast<uint32_t>(child)) * draft < target;
  }

  // The accepted child and its token, or -1 and a job.
  __device__ int64_t decide(const Node& node, int64_t slot, int64_t& token, int32_t& status) {
    token = -1;
    const int64_t child = next_child(window_, b_, slot, slot);
    if (child < 0) return leave(Draws::kept, slot, position(), kBonusStream, 0, 0.0f);
    if (!a_.has_draft()) return against_one_hot(node, slot, child, token);
    status |= node.draft_status;
    if (node.draft_status != kRowOk)
      return leave(Draws::kept, slot, position(), kResidualStream, 0, 0.0f);
    return against_draft(node, slot, child, token);
  }

  __device__ int64_t against_draft(const Node& node, int64_t slot, int64_t child, int64_t& token) {
    const Row row(a_.target, b_, slot);
    const Target<Row> target = {row, node};
    const Draft draft(a_, node, b_, slot, -1);
    float target_total = 1.0f, draft_total = 1.0f;
    int64_t draft_mass = -1;  // not known: most nodes have one child
    int32_t count = 0;
    for (;;) {
      const int64_t tried = token_at(window_, b_, child);
      const Left left = {rounds_, count};
      const bool inside = tried >= 0 && tried < draft.size();
      const float q = inside && !was_tried(tried, count) ? draft.probability(tried) : 0.0f;
      const float p = left.of(target.probability(tried), draft.probability(tried), tried);
      if (accepts(child, q / draft_total, p / target_total)) {
        token = tried;
        return child;
      }
      note(count++, tried, target_total, draft_total);
      child = next_child(window_, b_, slot, child);
      if (child < 0) break;
      if (draft_mass < 0) draft_mass = mass_of_draft(draft, slot);
      const int bits = mass_bits(draft.size());
      draft_mass -= to_mass(q, power_of_two(bits));
      draft_total = mass_as_float(draft_mass, bits);
      target_total = sum_over_target(target, [&](int64_t id, float probability) {
        return Left{rounds_, count}.of(probability, draft.probability(id), id);
      });
      if (target_total == 0.0f || draft_total == 0.0f) break;
    }
    return leave(Draws::residual, slot, position(), kResidualStream, count, 0.0f);
  }

  // Of the draft's probabilities on the target's ids.
  __device__ int64_t mass_of_draft(const Draft& draft, int64_t slot) const {
    const float mass_scale = power_of_two(mass_bits(draft.size()));
    const int64_t* map = a_.params.draft_vocab_map;
    Key sum = 0;
    with_draft_row(a_, b_, slot, [&](const auto& row) {
      constexpr int kPack = std::decay_t<decltype(row)>::kPack;
      row.each_pack(0, row.size(), [&](const float (&x)[kPack], int64_t first) {
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          if (!(x[j] > -kInfinity)) continue;
          const int64_t id = map == nullptr ? first + j : map[first + j];
          if (id >= 0 && id < draft.size())
            sum += Key(to_mass(draft.probability_of(x[j]), mass_scale));
        }
      });
    });
    return static_cast<int64_t>(reduce_block<Sum>(sum));
  }

  __device__ int64_t against_one_hot(const Node& node, int64_t slot, int64_t child,
                                     int64_t& token) {
    const Row row(a_.target, b_, slot);
    const int bits = mass_bits(row.size());
    int64_t left = node.mass;
    int32_t count = 0;
    for (; child >= 0; child = next_child(window_, b_, slot, child)) {
      const int64_t tried = token_at(window_, b_, child);
      if (tried < 0 || tried >= row.size() || was_tried(tried, count)) continue;
      const float value = node.scale.value(row.value(tried));
      if (!(value >= node.threshold)) continue;
      if (accepts(child, 1.0f, exp_(value) / mass_as_float(left, bits))) {
        token = tried;
        return child;
      }
      note(count++, tried, 1.0f, 1.0f);
      left -= to_mass(exp_(value), power_of_two(bits));
    }
    return leave(Draws::without_tried, slot, position(), kResidualStream, count, 0.0f);
  }

  __device__ bool was_tried(int64_t token, int32_t count) const {
    for (int32_t i = 0; i < count; ++i)
      if (rounds_[i].tried == token) return true;
    return false;
  }
  // All threads write the same, and each reads what it wrote itself.
  __device__ void note(int32_t at, int64_t tried, float target_total, float draft_total) {
    rounds_[at] = {tried, target_total, draft_total};
  }

  // ---- block: a chain is accepted as a whole

  __device__ bool has_draft_at(const Node& node, int64_t slot) const {
    return slot + 1 < num_nodes(window_, b_) && (!a_.has_draft() || node.draft_status == kRowOk);
  }
  __device__ int64_t drafted_after(int64_t slot) const {
    return slot + 1 < num_nodes(window_, b_) ? token_at(window_, b_, slot + 1) : -1;
  }

  __device__ void block() {
    const int64_t step = a_.params.sampling.step[b_];
    const Noise coins = noise_at(a_, b_, step, kAcceptStream);
    int64_t last = 0;
    int32_t status = kRowOk;
    float weight = 1.0f, last_weight = 1.0f;
    for (int64_t slot = 0;; ++slot) {
      const Node node = load_node(a_, b_, slot);
      const Row row(a_.target, b_, slot);
      const Target<Row> target = {row, node};
      const int64_t token = drafted_after(slot);
      const bool exists = has_draft_at(node, slot);
      const Draft draft(a_, node, b_, slot, token);
      status |= node.status;
      if (a_.has_draft() && slot + 1 < num_nodes(window_, b_)) status |= node.draft_status;
      if (slot == 0 ||
          coin(coins, static_cast<uint32_t>(slot)) < likelihood(target, draft, exists, weight)) {
        last = slot;
        last_weight = weight;
      }
      if (!exists) break;
      const float joint = weight * target.probability(token);
      if (joint == 0.0f) break;
      const float drafted = draft.probability(token);
      weight = joint >= drafted ? 1.0f : joint / drafted;
    }
    emit_block(last, last_weight, status, step);
  }

  // That a node stands.
  __device__ float likelihood(const Target<Row>& target, const Draft& draft, bool exists,
                              float weight) const {
    if (!exists || weight >= 1.0f) return weight;
    const float mass = sum_over_target(target, [&](int64_t id, float probability) {
      return block_left(weight, probability, draft.probability(id));
    });
    return mass / (mass + (1.0f - weight));
  }

  __device__ void emit_block(int64_t last, float weight, int32_t status, int64_t step) {
    for (int64_t slot = 0; slot < last; ++slot)
      result_.append(slot, token_at(window_, b_, slot + 1), status);
    const Node node = load_node(a_, b_, last);
    if (!node.decided) {
      const bool exists = has_draft_at(node, last);
      leave(exists ? Draws::block : Draws::kept, last, step,
            exists ? kResidualStream : kBonusStream, 0, weight);
    }
    result_.append(last, node.decided ? node.token : -1, status);
  }

  // ---- typical: the deepest node that stands

  __device__ void typical() {
    int32_t* depths = a_.space.stands + b_ * window_.width;
    const int64_t nodes = num_nodes(window_, b_);
    const int32_t* parents = window_.parents + b_ * window_.width;
    for (int64_t slot = 1 + threadIdx.x; slot < nodes; slot += kThreads)
      depths[slot] = stands(slot, parents[slot]) ? 1 : -1;
    __syncthreads();
    SPECDEC_SHARED(int64_t, deepest);
    if (threadIdx.x == 0) {
      depths[0] = 0;
      deepest = 0;
      for (int64_t slot = 1; slot < nodes; ++slot) {
        if (depths[slot] < 0) continue;
        const int32_t above = depths[parents[slot]];
        depths[slot] = above < 0 ? -1 : above + 1;
        if (depths[slot] > depths[deepest]) deepest = slot;
      }
    }
    __syncthreads();
    emit_typical(deepest, depths);
  }

  // Whether a slot would stand if its parent did.
  __device__ bool stands(int64_t slot, int64_t parent) const {
    if (parent < 0 || parent >= slot) return false;
    const Node node = load_node(a_, b_, parent);
    const Row row(a_.target, b_, parent);
    return Target<Row>{row, node}.probability(token_at(window_, b_, slot)) > node.lowest;
  }

  __device__ void emit_typical(int64_t best, const int32_t* depths) {
    const int32_t* parents = window_.parents + b_ * window_.width;
    const int64_t depth = depths[best];
    for (int64_t i = 0; i < depth; ++i) {
      int64_t child = best;  // of the path's slot i
      for (int64_t up = depth; up > i + 1; --up) child = parents[child];
      const int64_t slot = parents[child];
      result_.append(slot, token_at(window_, b_, child), load_node(a_, b_, slot).status);
    }
    const Node node = load_node(a_, b_, best);
    if (!node.decided) leave(Draws::kept, best, position(), kBonusStream, 0, 0.0f);
    result_.append(best, node.decided ? node.token : -1, node.status);
  }

  // Leaves the next token of the output to the last kernel; -1.
  __device__ int64_t leave(Draws draws, int64_t slot, int64_t counter, uint32_t stream,
                           int32_t rounds, float weight) {
    if (threadIdx.x == 0)
      a_.space.jobs[b_] = {draws,
                           static_cast<int32_t>(slot),
                           static_cast<int32_t>(result_.length()),
                           stream,
                           counter,
                           rounds,
                           weight};
    return -1;
  }

  const Arguments& a_;
  int64_t b_;
  const WindowArrays& window_;
  Round* rounds_;
  AcceptanceWriter result_;
};

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
