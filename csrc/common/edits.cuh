// Bias and penalties on the device: a table for each row of the batch, looked up for the few tokens
// that are marked as touched.
#pragma once

#include "common/block.cuh"
#include "common/element.cuh"
#include "common/sampling.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// One token of a row's list, its duplicates merged. An open-addressing table of these, all zero at
// first.
struct Place {
  int id_plus_one;  // 0: free
  float bias;
  int32_t count;  // times generated; -1: not in the text
};

struct EditTables {
  Place* places;        // [batch, num_places]
  uint32_t num_places;  // a power of two
  uint32_t* marks;      // [batch, mark_words], a bit for each token that an edit may touch
  int64_t mark_words;   // one more than the vocabulary needs
};

SPECDEC_INLINE uint32_t first_place(int64_t id, uint32_t num_places) {
  return static_cast<uint32_t>(id) * 2654435761u & (num_places - 1);
}

SPECDEC_INLINE bool has_penalties(const EditArrays& edits) {
  return edits.repetition_penalty != nullptr || edits.presence_penalty != nullptr ||
         edits.frequency_penalty != nullptr;
}

// The first of equal ids adds up all of them, in order, and stores the sum.
__device__ inline void insert_token(const EditArrays& edits, const EditTables& tables, int64_t b,
                                    int64_t index, int64_t vocab) {
  const int64_t* ids = edits.token_ids + b * edits.num_tokens;
  const int64_t id = ids[index];
  if (id < 0 || id >= vocab) return;
  float bias = 0.0f;
  int32_t count = -1;
  bool first = true;
  for (int64_t i = 0; i < edits.num_tokens; ++i) {
    if (ids[i] != id) continue;
    if (i < index) return;
    const int64_t at = b * edits.num_tokens + i;
    const float more = edits.token_bias == nullptr ? 0.0f : edits.token_bias[at];
    const int32_t given = edits.token_counts == nullptr ? -1 : max(edits.token_counts[at], -1);
    bias = first ? more : bias + more;
    count = count < 0 || given < 0 ? max(count, given) : count + given;
    first = false;
  }
  Place* table = tables.places + b * tables.num_places;
  uint32_t at = first_place(id, tables.num_places);
  while (atomicCAS(&table[at].id_plus_one, 0, static_cast<int>(id + 1)) != 0)
    at = (at + 1) & (tables.num_places - 1);
  table[at].bias = bias;
  table[at].count = count;
}

// One block for each row of the batch. window.num_nodes is null where there are no drafts.
__global__ void __launch_bounds__(kThreads)
    list_edits_kernel(const EditArrays edits, const EditTables tables, const WindowArrays window,
                      const int64_t vocab) {
  const int64_t b = blockIdx.x;
  uint32_t* marks = tables.marks + b * tables.mark_words;
  for (int64_t i = threadIdx.x; i < edits.num_tokens; i += kThreads) {
    insert_token(edits, tables, b, i, vocab);
    const int64_t id = edits.token_ids[b * edits.num_tokens + i];
    if (id >= 0 && id < vocab) atomicOr(marks + id / 32, 1u << (id % 32));
  }
  if (window.num_nodes == nullptr || !has_penalties(edits)) return;
  const int64_t nodes = min(int64_t(window.num_nodes[b]), window.width);
  for (int64_t slot = 1 + threadIdx.x; slot < nodes; slot += kThreads) {
    const int64_t id = window.draft_token_ids[b * window.width + slot];
    if (id >= 0 && id < vocab) atomicOr(marks + id / 32, 1u << (id % 32));
  }
}

// The parent of a drafted slot; the root's for one that names no earlier slot.
SPECDEC_INLINE int64_t parent_of(const int32_t* parents, int64_t slot) {
  const int64_t named = parents[slot];
  return named > 0 && named < slot ? named : 0;
}

// How often `id` was drafted on the way from the root to a slot, the slot included.
SPECDEC_INLINE int32_t drafted_times(const WindowArrays& window, int64_t b, int64_t slot,
                                     int64_t id) {
  const int64_t* tokens = window.draft_token_ids + b * window.width;
  const int32_t* parents = window.parents + b * window.width;
  int32_t times = 0;
  for (int64_t at = slot; at > 0; at = parent_of(parents, at)) times += tokens[at] == id;
  return times;
}

// The edited logit of a marked token at one node.
SPECDEC_INLINE float edited(const EditArrays& edits, const EditTables& tables,
                            const WindowArrays& window, int64_t b, int64_t slot, int64_t id,
                            float logit) {
  const Place* table = tables.places + b * tables.num_places;
  uint32_t at = first_place(id, tables.num_places);
  while (table[at].id_plus_one != 0 && table[at].id_plus_one != id + 1)
    at = (at + 1) & (tables.num_places - 1);
  const bool known = table[at].id_plus_one != 0;
  int32_t count = known ? table[at].count : -1;
  if (window.num_nodes != nullptr && has_penalties(edits)) {
    const int32_t times = drafted_times(window, b, slot, id);
    if (times > 0) count = max(count, 0) + times;
  }
  if (known) logit = table[at].bias == -kInfinity ? -kInfinity : logit + table[at].bias;
  if (count < 0) return logit;
  const float repetition = edits.repetition_penalty == nullptr ? 1.0f : edits.repetition_penalty[b];
  logit = logit < 0.0f ? logit * repetition : logit / repetition;
  if (count == 0) return logit;
  if (edits.frequency_penalty != nullptr)
    logit = logit - edits.frequency_penalty[b] * static_cast<float>(count);
  return edits.presence_penalty == nullptr ? logit : logit - edits.presence_penalty[b];
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
