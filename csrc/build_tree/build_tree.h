#pragma once

#include <cstdint>

#include "common/isa.h"
#include "common/status.h"

namespace specdec {

// The best nodes of a tree of candidates, as a verify window.
struct BuildTreeParams {
  const int64_t* root_token_ids;  // [batch]
  const int64_t* token_ids;       // [batch, candidates], like the next two
  const float* scores;
  const int32_t* parents;    // index of a candidate, -1 for the root
  const int32_t* max_nodes;  // [batch]
  int64_t batch;
  int64_t candidates;
  int64_t width;
  int64_t* draft_token_ids;  // [batch, width]
  int32_t* window_parents;   // [batch, width]
  int32_t* num_nodes;        // [batch]
  uint64_t* tree_mask;       // [batch, width, ceil(width / 64)]
  int32_t* depth;            // [batch, width]
  int num_threads;
};

}  // namespace specdec

SPECDEC_CPU_OP(build_tree, BuildTreeParams)
