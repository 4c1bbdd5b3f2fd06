// The last part of verification: drawing the token that the walk left, the vocabulary cut into
// slices.
#pragma once

#include "rejection_sample/walk.cuh"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// From what rejected drafts have left, left(id, target probability) for tokens that the target
// gives any chance. 0 where nothing is left.
template <class Row, class LeftOf>
__device__ Key draw_left(const Target<Row>& target, const Noise& noise, int64_t begin, int64_t end,
                         LeftOf left_of) {
  constexpr int kPack = Row::kPack;
  GumbelScan scan(noise, GumbelScan::new_floor());
  target.row.each_pack(begin, end, [&](const float (&x)[kPack], int64_t first) {
    float left[kPack] = {};
    float highest = 0.0f;
    each_target(target, x, first, [&](int at, int64_t id, float probability) {
      const float some = left_of(id, probability);
      highest = some > highest ? some : highest;
#pragma unroll
      for (int j = 0; j < kPack; ++j) left[j] = j == at ? some : left[j];
    });
    scan.see<kPack>(log_(highest), first, [&](int j) { return log_(pick(left, j)); });
  });
  return reduce_block<Largest>(scan.key());
}

// From the kept tokens but those that were tried, if any.
template <class Row>
__device__ Key draw_untried(const Row& row, const Node& node, const Left& tried, const Noise& noise,
                            int64_t begin, int64_t end) {
  constexpr int kPack = Row::kPack;
  GumbelScan scan(noise, GumbelScan::new_floor());
  row.each_pack(begin, end, [&](const float (&x)[kPack], int64_t first) {
    scan.see<kPack>(node.scale.value_bound(highest_of(x)), first, [&](int j) {
      const float value = node.scale.value(pick(x, j));
      bool candidate = value >= node.threshold;
      for (int32_t i = 0; i < tried.count; ++i)
        candidate = candidate && tried.rounds[i].tried != first + j;
      return candidate ? value : -kInfinity;
    });
  });
  return reduce_block<Largest>(scan.key());
}

template <class Row>
__device__ Key draw_job(const Arguments& a, const Row& row, const Node& node, const Job& job,
                        int64_t b, const Noise& noise, int64_t begin, int64_t end) {
  const Left left = {a.space.rounds + b * a.params.window.width, job.rounds};
  const int64_t next = job.slot + 1;
  const bool has_next = next < num_nodes(a.params.window, b);
  const Draft draft(a, node, b, job.slot, has_next ? token_at(a.params.window, b, next) : -1);
  const Target<Row> target = {row, node};
  if (job.draws == Draws::kept || job.draws == Draws::without_tried)
    return draw_untried(row, node, left, noise, begin, end);
  return draw_left(target, noise, begin, end, [&](int64_t id, float probability) {
    const float drafted = draft.probability(id);
    return job.draws == Draws::block ? block_left(job.weight, probability, drafted)
                                     : left.of(probability, drafted, id);
  });
}

template <class T>
__device__ void draw_slice(const Arguments& a, const Slices& slices, int64_t b, int64_t slice) {
  const Job job = a.space.jobs[b];
  if (job.draws == Draws::nothing) return;
  const Source<T> row(a.target, b, job.slot);
  const Node node = load_node(a, b, job.slot);
  const Noise noise = noise_at(a, b, job.counter, job.stream);
  const int64_t begin = slice * slices.length;
  Key key =
      draw_job(a, row, node, job, b, noise, begin, min(begin + slices.length, a.params.vocab));
  if (slices.count > 1) {
    if (threadIdx.x == 0 && key != 0) atomicMax(a.space.drawn + b, key);
    if (!is_last_block(a.space.draw_tickets + b, slices.count)) return;
    key = __ldcg(a.space.drawn + b);
  }
  if (key == 0) key = draw_untried(row, node, Left{nullptr, 0}, noise, 0, a.params.vocab);
  if (threadIdx.x == 0)
    a.params.acceptance.output_token_ids[b * a.params.window.width + job.index] =
        key == 0 ? node.token : key_index(key);
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
