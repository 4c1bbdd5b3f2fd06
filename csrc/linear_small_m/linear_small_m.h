#pragma once

#include "common/isa.h"
#include "common/params.h"
#include "common/status.h"

namespace specdec {

struct LinearSmallMParams {
  int num_threads;
};

}  // namespace specdec

SPECDEC_CPU_OP(linear_small_m, LinearSmallMParams)
