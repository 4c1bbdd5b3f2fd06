#pragma once

#include "common/isa.h"
#include "common/params.h"
#include "common/status.h"

namespace specdec {

// The k most likely tokens of each row. Places without a token hold id -1 and -infinity.
struct TopkLogprobsParams {
  const void* logits;  // [rows, vocab], dense last dimension
  DType dtype;
  int64_t stride;
  int64_t rows;
  int64_t vocab;  // below 2^32
  int64_t k;
  float* logprobs;     // [rows, k]
  int64_t* token_ids;  // [rows, k]
  float* lse;          // [rows]
  int num_threads;
};

}  // namespace specdec

SPECDEC_CPU_OP(topk_logprobs, TopkLogprobsParams)
