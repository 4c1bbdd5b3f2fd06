#pragma once

#include "common/cuda_launch.h"
#include "common/isa.h"
#include "common/params.h"
#include "common/status.h"

namespace specdec {

// Moves the K and V rows of the accepted path to the slots right behind the prefix, in every layer:
// slot prefix_len + i receives slot prefix_len + path[i]. Because slots are topologically sorted,
// path[i] >= i, so copying in order never overwrites a row that is still needed.
struct CommitKvParams {
  // Per cache tensor (K and V of every layer): base pointer and strides of [B, Hkv, S, D], or of
  // [pages, page, Hkv, D] with a block table.
  void* const* caches;
  const int64_t* shapes;   // [num_caches, 4]
  const int64_t* strides;  // [num_caches, 4]
  int64_t num_caches;
  int64_t item_size;

  const int32_t* path;  // [B, path_stride]
  int64_t path_stride;
  const int32_t* num_kept;    // [B]
  const int32_t* prefix_len;  // [B]
  int64_t batch;

  const int32_t* block_table;  // [B, block_table_stride] or nullptr
  int64_t block_table_stride;
  int num_threads;
};

}  // namespace specdec

SPECDEC_CPU_OP(commit_kv, CommitKvParams)

namespace specdec {

// Every pointer is device memory here, `caches`, `shapes` and `strides` included. One launch.
int commit_kv_cuda(const CommitKvParams& params, const CudaLaunch& launch);

}  // namespace specdec
