#pragma once

#include "common/cuda_launch.h"
#include "common/isa.h"
#include "common/params.h"
#include "common/sampling.h"
#include "common/status.h"

namespace specdec {

// `token` is `recursive` on chains. specdec_kernels/ops/rejection_sample numbers them alike.
enum class Rule : int { coupled = 0, recursive = 1, block = 2, typical = 3 };

// Accepts drafted tokens so that what is emitted has the target's distribution.
struct RejectionSampleParams {
  const void* target;  // [batch, width, vocab], dense last dimension
  DType target_dtype;
  int64_t target_stride_b;
  int64_t target_stride_t;
  int64_t vocab;

  const void* draft;  // [batch, width, draft_vocab], dense last dimension, or nullptr: one-hot
  DType draft_dtype;
  int64_t draft_stride_b;
  int64_t draft_stride_t;
  int64_t draft_vocab;
  const int64_t* draft_vocab_map;  // [draft_vocab] or nullptr

  WindowArrays window;
  SamplingArrays sampling;
  AcceptanceArrays acceptance;
  Rule rule;
  float posterior_threshold;  // of typical
  float posterior_alpha;
  int num_threads;
};

}  // namespace specdec

SPECDEC_CPU_OP(rejection_sample, RejectionSampleParams)

namespace specdec {

// Every pointer is device memory here. `workspace` holds as many zeroed 64-bit words as
// rejection_sample_cuda_workspace says, which looks at sizes and at which optional arrays there
// are. `block`, and `recursive` with draft logits and one child per node, take the window as the
// chain of its slots or as its parents say; nothing is checked.
//
// Moves, in bytes: `coupled` reads nodes * vocab * item_size once. The other rules read target and
// draft once for the largest logits and once more, mostly from the second-level cache, for the
// mass; a filter reads its row two more times; then one row of each for the token behind the
// accepted ones. `recursive` reads one more row of each per rejected sibling, `block` per slot.
int64_t rejection_sample_cuda_workspace(const RejectionSampleParams& params);
int rejection_sample_cuda(const RejectionSampleParams& params, void* workspace,
                          const CudaLaunch& launch);

}  // namespace specdec
