#pragma once

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
