#include "tree_attention/mma_launch.cuh"

namespace specdec {

template cudaError_t launch_mma<BFloat16>(const TreeAttentionParams&, const TreeAttentionPlan&,
                                          const AttentionWorkspace&, cudaStream_t);

}  // namespace specdec
