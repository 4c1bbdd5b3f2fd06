#pragma once

#include "common/cuda_launch.h"
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
  // For CUDA alone, which sees no lengths when it cuts the work:
  int64_t cache_slots;  // keys that a row has room for
  int64_t num_pages;    // only with block_table

  float scale;
  float softcap;       // 0: none
  int64_t window;      // 0: none, else visible when query position - key position < window
  int64_t split_size;  // 0: chosen from the sizes and the number of threads
  int num_threads;
};

}  // namespace specdec

SPECDEC_CPU_OP_BF16(tree_attention, TreeAttentionParams)

namespace specdec {

// How a call is cut for a GPU. It follows from sizes alone: lengths are known to the device only.
struct TreeAttentionPlan {
  bool hopper;         // the kernel for sm_90a
  int64_t dim;         // of a row in shared memory
  int64_t block_rows;  // of a block, of the T * G rows of a KV head
  bool key_warps;      // warps share the rows of a block, not its keys
  int64_t row_blocks;
  int64_t splits;
  int64_t floats;   // of workspace
  int64_t tickets;  // zeroed
};

// The number of plan.splits at most that a row's keys are cut into, and the workspace for it. Reads
// sizes, dtype and split_size of params. `hopper` asks for the kernel for sm_90a, which has never
// run on a device. Returns a cudaError_t: what no kernel does is "not supported".
int plan_tree_attention(const TreeAttentionParams& params, int device, bool hopper,
                        TreeAttentionPlan* plan);

// Every pointer is device memory. One launch, which reads the keys and values of a KV head once for
// up to plan.block_rows rows of queries, and nothing below a window:
//   B * Hkv * row_blocks * (prefix + nodes) * (D + Dv) elements,
// B * T * Hq * (D + Dv) elements for q and out, and with s > 1 splits of a row
// 8 * B * Hq * T * s * (Dv + 2) bytes for their parts (none with plan.hopper).
int tree_attention_cuda(const TreeAttentionParams& params, const TreeAttentionPlan& plan,
                        float* workspace, int32_t* tickets, const CudaLaunch& launch);

}  // namespace specdec
