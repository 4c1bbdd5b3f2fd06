#pragma once

#include "common/isa.h"
#include "common/params.h"
#include "common/status.h"

namespace specdec {

struct RejectionSampleParams {
  int num_threads;
};

}  // namespace specdec

SPECDEC_CPU_OP(rejection_sample, RejectionSampleParams)
