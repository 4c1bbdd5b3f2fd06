// The path for sm_90a, which is taken only when it is asked for: it has never run on a device.
#pragma once

#include "tree_attention/tree_attention.h"

namespace specdec {

// cudaErrorNotSupported on another device than sm_90 and for what this path doesn't do: fp32, head
// sizes over 256, fixed splits that are more than a cluster has blocks.
int plan_tree_attention_hopper(const TreeAttentionParams& params, int device, int multiprocessors,
                               TreeAttentionPlan* plan);

// Also not supported: caches whose rows don't start at 16 bytes, and pages that are neither whole
// tiles of 64 slots nor 8, 16 or 32 slots.
int tree_attention_hopper(const TreeAttentionParams& params, const TreeAttentionPlan& plan,
                          void* stream);

}  // namespace specdec
