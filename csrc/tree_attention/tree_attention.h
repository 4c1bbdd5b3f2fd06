#pragma once

#include "common/isa.h"
#include "common/params.h"
#include "common/status.h"

namespace specdec {

struct TreeAttentionParams {
  int num_threads;
};

}  // namespace specdec

SPECDEC_CPU_OP(tree_attention, TreeAttentionParams)
