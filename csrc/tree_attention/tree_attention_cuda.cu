#include "common/device_guard.cuh"
#include "tree_attention/hopper_launch.h"
#include "tree_attention/mma_launch.cuh"

namespace specdec {

extern template cudaError_t launch_mma<float>(const TreeAttentionParams&, const TreeAttentionPlan&,
                                              const AttentionWorkspace&, cudaStream_t);
extern template cudaError_t launch_mma<BFloat16>(const TreeAttentionParams&,
                                                 const TreeAttentionPlan&,
                                                 const AttentionWorkspace&, cudaStream_t);
extern template cudaError_t launch_mma<Half>(const TreeAttentionParams&, const TreeAttentionPlan&,
                                             const AttentionWorkspace&, cudaStream_t);

namespace {

constexpr int64_t kMostSplits = 128;  // of a row: the last block to finish reads a part of each

// The fewest splits that come within 15 % of the best use of whole waves of blocks.
// A row's length may be less than `longest`, which only means fewer splits then.
int64_t pick_splits(int64_t blocks, int64_t longest, int64_t at_once) {
  const int64_t useful = ceil_div(longest, kShortestSplit);
  const int64_t most = useful < kMostSplits ? useful : kMostSplits;
  const auto use = [&](int64_t splits) {
    return double(blocks * splits) / double(ceil_div(blocks * splits, at_once) * at_once);
  };
  double best = 0.0;
  for (int64_t splits = 1; splits <= most && best < 0.95; ++splits)
    best = use(splits) > best ? use(splits) : best;
  for (int64_t splits = 1; splits < most; ++splits)
    if (use(splits) >= 0.85 * best) return splits;
  return most > 1 ? most : 1;
}

}  // namespace

int plan_tree_attention(const TreeAttentionParams& p, int device, bool hopper,
                        TreeAttentionPlan* plan) {
  int multiprocessors = 0;
  const cudaError_t error =
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  if (hopper) return plan_tree_attention_hopper(p, device, multiprocessors, plan);
  const int64_t dim = p.dim > p.v_dim ? p.dim : p.v_dim;
  const bool short_rows = p.dtype != DType::f32 && dim <= 128;
  const int64_t rows = p.window_slots * (p.q_heads / p.kv_heads);
  *plan = {};
  for (const int64_t size : {256, 192, 128, 96, 64})
    if (dim <= size) plan->dim = size;
  if (plan->dim == 0) return cudaErrorNotSupported;
  plan->key_warps = rows <= 16 && p.split_size == 0;
  plan->block_rows = plan->key_warps                       ? 16
                     : rows <= 64 || p.dtype == DType::f32 ? 64
                     : short_rows                          ? 256
                                                           : 128;
  plan->row_blocks = ceil_div(rows, plan->block_rows);
  const int64_t tasks = p.batch * p.kv_heads * plan->row_blocks;
  // Two blocks of up to 64 rows find room on a multiprocessor.
  const int64_t at_once = int64_t(multiprocessors) * (plan->block_rows <= 64 ? 2 : 1);
  plan->splits = 1;
  if (tasks > 0 && p.cache_slots > 0)
    plan->splits = p.split_size > 0
                       ? ceil_div(p.cache_slots, ceil_div(p.split_size, kWordKeys) * kWordKeys)
                       : pick_splits(tasks, p.cache_slots, at_once);
  if (plan->splits > 1) {
    plan->floats = tasks * plan->splits * plan->block_rows * (plan->dim + 2);
    plan->tickets = tasks;
  }
  return cudaSuccess;
}

int tree_attention_cuda(const TreeAttentionParams& p, const TreeAttentionPlan& plan,
                        float* workspace, int32_t* tickets, const CudaLaunch& launch) {
  if (p.batch * p.window_slots == 0) return cudaSuccess;
  if (plan.row_blocks * plan.splits > INT32_MAX || p.kv_heads > 65535 || p.batch > 65535)
    return cudaErrorInvalidValue;
  const DeviceGuard guard(launch.device);
  if (guard.error() != cudaSuccess) return guard.error();
  if (plan.hopper) return tree_attention_hopper(p, plan, launch.stream);
  const AttentionWorkspace space{workspace, tickets, static_cast<int>(plan.row_blocks),
                                 static_cast<int>(plan.splits)};
  cudaStream_t stream = static_cast<cudaStream_t>(launch.stream);
  return with_element(
      p.dtype, [&](auto element) { return launch_mma<decltype(element)>(p, plan, space, stream); });
}

}  // namespace specdec
