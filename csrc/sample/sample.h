#pragma once

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
