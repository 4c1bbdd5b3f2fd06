#pragma once

#include "common/cuda_launch.h"
#include "common/isa.h"
#include "common/params.h"
#include "common/sampling.h"
#include "common/status.h"

namespace specdec {

// One draw per logits row.
struct SampleParams {
  const void* logits;  // [rows, vocab], dense last dimension
  DType dtype;
  int64_t stride;
  int64_t rows;
  int64_t vocab;
  SamplingArrays sampling;
  uint32_t stream;
  int64_t* tokens;  // [rows]
  int num_threads;
};

}  // namespace specdec

SPECDEC_CPU_OP(sample, SampleParams)

namespace specdec {

// Every pointer is device memory here. `workspace` holds as many zeroed 64-bit words as
// sample_cuda_workspace says, which looks at sizes and at which optional arrays there are.
//
// Moves rows * vocab * item_size bytes: each logit is read once; a filter reads its row two more
// times, from the second-level cache while all rows together fit.
int64_t sample_cuda_workspace(const SampleParams& params);
int sample_cuda(const SampleParams& params, void* workspace, const CudaLaunch& launch);

}  // namespace specdec
