// The first part of verification: every row of target and draft logits is scanned, and the last
// block of a slot finds out all that the walk will ask.
#pragma once

#include "rejection_sample/probabilities.cuh"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

SPECDEC_INLINE Noise noise_at(const Arguments& a, int64_t b, int64_t counter, uint32_t stream) {
  return Noise(a.params.sampling.seed[b], counter, stream);
}

// One of the rows of logits: slot `slot` of batch row b, of the draft or of the target.
struct Piece {
  int64_t b, slot, slice;
  bool of_draft;

  __device__ Piece(const Arguments& a, int64_t block) {
    const int64_t width = a.params.window.width, rows = a.params.window.batch * width;
    const int64_t row = static_cast<uint32_t>(block) / static_cast<uint32_t>(a.target_slices.count);
    slice = block - row * a.target_slices.count;
    of_draft = row >= rows;
    const int64_t target_row = of_draft ? row - rows : row;
    b = target_row / width;
    slot = target_row - b * width;
  }
};

SPECDEC_INLINE Scanned* slices_of(const Arguments& a, int64_t b, int64_t slot, bool of_draft) {
  const int64_t rows = a.params.window.batch * a.params.window.width;
  const int64_t row = b * a.params.window.width + slot + (of_draft ? rows : 0);
  return a.space.scanned + row * a.target_slices.count;
}

template <class Row>
__device__ Scanned scan_piece(const Arguments& a, const Row& row, const Slices& slices,
                              const Piece& piece, bool draws) {
  const int64_t begin = min(piece.slice * slices.length, row.size());
  const int64_t end = min(begin + slices.length, row.size());
  const float temperature = a.params.sampling.temperature[piece.b];
  const int64_t depth = draws ? depth_of(a.params.window, piece.b, piece.slot) : 0;
  const Noise noise =
      noise_at(a, piece.b, a.params.sampling.position[piece.b] + depth, kBonusStream);
  return scan_slice(row, begin, end, temperature, draws && temperature > 0.0f, noise);
}

template <class T, bool kCoupled>
__device__ void scan(const Arguments& a, const Piece& piece) {
  Scanned scanned = {0, 0, -kInfinity, 0};
  if (!piece.of_draft) {
    scanned =
        scan_piece(a, Source<T>(a.target, piece.b, piece.slot), a.target_slices, piece, kCoupled);
  } else if (next_child(a.params.window, piece.b, piece.slot, piece.slot) >= 0) {
    with_draft_row(a, piece.b, piece.slot, [&](const auto& row) {
      scanned = scan_piece(a, row, a.draft_slices, piece, false);
    });
  }
  store_scanned(slices_of(a, piece.b, piece.slot, piece.of_draft) + piece.slice, scanned);
}

// The sum of weights * -values: what the entropy takes from it.
template <class Row>
__device__ float spread_of(const Row& row, const Distribution& from) {
  const int bits = mass_bits(row.size());
  const float mass_scale = power_of_two(bits);
  Key sum = 0;
  each_value(row, from.scale, from.threshold,
             [&](float value) { sum += Key(to_mass(exp_(value) * -value, mass_scale)); });
  return mass_as_float(static_cast<int64_t>(reduce_block<Sum>(sum)), bits);
}

// min(threshold, alpha exp(-entropy)).
template <class Row>
__device__ float typical_bound(const Arguments& a, const Row& row, const Distribution& from,
                               float total) {
  const float entropy = from.decided ? 0.0f : log_(total) + spread_of(row, from) / total;
  const float scaled = a.params.posterior_alpha * exp_(-entropy);
  return scaled < a.params.posterior_threshold ? scaled : a.params.posterior_threshold;
}

__device__ inline void read_draft(const Arguments& a, int64_t b, int64_t slot, Node& node) {
  const Scanned scanned = merge_slices(slices_of(a, b, slot, true), a.draft_slices.count);
  node.draft_status = scanned.has_nan ? kRowNan : scanned.extreme == 0 ? kRowEmpty : kRowOk;
  node.draft_largest = scanned.extreme == 0 ? -kInfinity : key_value(scanned.extreme);
  if (node.draft_status != kRowOk) return;
  with_draft_row(a, b, slot, [&](const auto& row) {
    node.draft_total = total_mass(row, Scale(1.0f, node.draft_largest), kLowestFinite);
  });
}

// By the last block of a slot: what it is drawn from, and under `coupled` the drawn token.
template <class T, bool kCoupled>
__device__ void finish_node(const Arguments& a, int64_t b, int64_t slot) {
  const Source<T> row(a.target, b, slot);
  const Scanned scanned = merge_slices(slices_of(a, b, slot, false), a.target_slices.count);
  const Distribution from = distribution_of(row, scanned, a.params.sampling, b);
  Node node{};
  node.token = from.token;
  node.decided = from.decided;
  node.status = from.status;
  node.scale = from.scale;
  node.threshold = from.threshold;
  if constexpr (kCoupled) {
    const int64_t position = a.params.sampling.position[b] + depth_of(a.params.window, b, slot);
    node.token = draw(row, scanned, from, noise_at(a, b, position, kBonusStream));
  } else {
    node.mass = from.decided ? 0 : kept_mass(row, from.scale, from.threshold);
    node.total = mass_as_float(node.mass, mass_bits(row.size()));
    if (a.params.rule == Rule::typical) node.lowest = typical_bound(a, row, from, node.total);
    if (a.has_draft()) read_draft(a, b, slot, node);
  }
  if (threadIdx.x == 0) a.space.nodes[b * a.params.window.width + slot] = node;
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
