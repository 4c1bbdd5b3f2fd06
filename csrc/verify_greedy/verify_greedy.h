#pragma once

#include "common/cuda_launch.h"
#include "common/isa.h"
#include "common/params.h"
#include "common/sampling.h"
#include "common/status.h"

namespace specdec {

// Accepts drafted tokens that equal the argmax at their parent. Only rows of nodes are read.
struct VerifyGreedyParams {
  const void* logits;  // [batch, width, vocab], dense last dimension
  DType dtype;
  int64_t stride_b;
  int64_t stride_t;
  int64_t vocab;
  WindowArrays window;
  AcceptanceArrays acceptance;
  int num_threads;
};

}  // namespace specdec

SPECDEC_CPU_OP(verify_greedy, VerifyGreedyParams)

namespace specdec {

// Every pointer is device memory here. `workspace` holds batch * (2 * width + 1) zeroed 64-bit
// words.
int verify_greedy_cuda(const VerifyGreedyParams& params, void* workspace, const CudaLaunch& launch);

}  // namespace specdec
