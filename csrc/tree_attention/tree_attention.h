#pragma once

#include "common/isa.h"
#include "common/params.h"
#include "common/status.h"

namespace specdec {

// A tensor as the kernel sees it; strides count elements. data is nullptr when it was not given.
struct AttentionView {
  const void* data;
  int64_t stride[4];
};

// Attention of the verify window: every node sees its row's prefix and its own ancestors.
struct TreeAttentionParams {
  AttentionView q;  // [B, T, Hq, D]
  AttentionView k;  // strides of (batch or page, head, slot); rows of D dense elements
  AttentionView v;  // the same, rows of Dv
  DType dtype;
  void* out;   // [B, T, Hq, Dv], contiguous
  float* lse;  // [B, Hq, T], contiguous
  int64_t batch, window_slots, q_heads, kv_heads, dim, v_dim;

  AttentionView prefix_len;   // i32 [B]
  AttentionView num_nodes;    // i32 [B]
  AttentionView tree_mask;    // i64 [B, T, mask_words] or none: causal chain
  AttentionView depth;        // i32 [B, T]; read only with tree_mask and a window
  AttentionView sinks;        // f32 [Hq] or none
  AttentionView block_table;  // i32 [B, M] or none
  int64_t mask_words;
  int64_t page_size;  // slots per page; only with block_table

  float scale;
  float softcap;       // 0: none
  int64_t window;      // 0: none, else visible when query position - key position < window
  int64_t split_size;  // 0: chosen from the sizes and the number of threads
  int num_threads;
};

}  // namespace specdec

SPECDEC_CPU_OP_BF16(tree_attention, TreeAttentionParams)
