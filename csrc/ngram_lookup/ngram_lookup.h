#pragma once

#include "common/isa.h"
#include "common/params.h"
#include "common/status.h"

namespace specdec {

struct NgramLookupParams {
  int num_threads;
};

}  // namespace specdec

SPECDEC_CPU_OP(ngram_lookup, NgramLookupParams)
