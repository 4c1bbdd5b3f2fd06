#include "common/device_guard.cuh"
#include "tree_attention/hopper_host.cuh"
#include "tree_attention/hopper_kernel.cuh"
#include "tree_attention/hopper_launch.h"

namespace specdec {
namespace {

// Keys or values; the copies are boxes of [box_slots, 64].
TensorOfRows tensor_of(const TreeAttentionParams& p, const AttentionView& view, int64_t columns,
                       int box_slots) {
  const bool paged = p.block_table.data != nullptr;
  const int64_t item = item_size(p.dtype);
  return {view.data,
          p.dtype,
          columns,
          paged ? p.page_size : p.cache_slots,
          p.kv_heads,
          paged ? p.num_pages : p.batch,
          view.stride[2] * item,
          view.stride[1] * item,
          view.stride[0] * item,
          kBoxColumns,
          box_slots};
}

template <class C>
cudaError_t launch_config(const TreeAttentionParams& p, const TreeAttentionPlan& plan,
                          const HopperMaps& maps, cudaStream_t stream) {
  if (plan.block_rows != C::kRows) return cudaErrorInvalidValue;
  const auto kernel = hopper_attention_kernel<C>;
  const cudaError_t error = allow_dynamic_shared(kernel, C::kSharedBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(plan.row_blocks * plan.splits),
                  static_cast<unsigned>(p.kv_heads), static_cast<unsigned>(p.batch));
  return launch_clusters(kernel, grid, dim3(C::kThreads), C::kSharedBytes, stream,
                         static_cast<unsigned>(plan.splits), p, maps, static_cast<int>(plan.splits),
                         copies_chunks(p.q, p.dim, 2));
}

template <class Element, int kDim>
cudaError_t launch_dim(const TreeAttentionParams& p, const TreeAttentionPlan& plan,
                       const HopperMaps& maps, cudaStream_t stream) {
  constexpr int kRowTiles = kDim <= 128 ? 2 : 1;
  if (plan.block_rows == kGroupRows)
    return launch_config<HopperConfig<Element, kDim, 1, 1>>(p, plan, maps, stream);
  return launch_config<HopperConfig<Element, kDim, 2, kRowTiles>>(p, plan, maps, stream);
}

template <class Element>
cudaError_t launch_element(const TreeAttentionParams& p, const TreeAttentionPlan& plan,
                           const HopperMaps& maps, cudaStream_t stream) {
  switch (plan.dim) {
    case 64:
      return launch_dim<Element, 64>(p, plan, maps, stream);
    case 128:
      return launch_dim<Element, 128>(p, plan, maps, stream);
    case 192:
      return launch_dim<Element, 192>(p, plan, maps, stream);
    case 256:
      return launch_dim<Element, 256>(p, plan, maps, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

// Slots that one copy brings, or 0 when pages cannot be copied.
int box_slots_of(const TreeAttentionParams& p) {
  constexpr int kTile = 64;
  if (p.block_table.data == nullptr || p.page_size % kTile == 0) return kTile;
  return p.page_size >= 8 && kTile % p.page_size == 0 ? static_cast<int>(p.page_size) : 0;
}

}  // namespace

int plan_tree_attention_hopper(const TreeAttentionParams& p, int device, int multiprocessors,
                               TreeAttentionPlan* plan) {
  int major = 0;
  const cudaError_t error =
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  const int64_t dim = p.dim > p.v_dim ? p.dim : p.v_dim;
  const int64_t rows = p.window_slots * (p.q_heads / p.kv_heads);
  *plan = {};
  plan->hopper = true;
  plan->dim = ceil_div(dim, kBoxColumns) * kBoxColumns;
  plan->block_rows = rows <= kGroupRows ? kGroupRows : plan->dim <= 128 ? 256 : 128;
  plan->row_blocks = ceil_div(rows, plan->block_rows);
  const int64_t blocks = p.batch * p.kv_heads * plan->row_blocks;
  const int64_t useful =
      ceil_div(p.cache_slots,
               p.split_size > 0 ? ceil_div(p.split_size, kWordKeys) * kWordKeys : kShortestSplit);
  plan->splits = 1;
  while (plan->splits < useful && plan->splits < kMostClusterBlocks &&
         (p.split_size > 0 || 2 * plan->splits * blocks <= multiprocessors))
    plan->splits *= 2;
  const bool fits =
      p.dtype != DType::f32 && plan->dim <= 256 && (p.split_size == 0 || plan->splits >= useful);
  return fits ? cudaSuccess : cudaErrorNotSupported;
}

int tree_attention_hopper(const TreeAttentionParams& p, const TreeAttentionPlan& plan,
                          void* stream) {
  const int box_slots = box_slots_of(p);
  if (box_slots == 0 || !copies_chunks(p.k, p.dim, 2) || !copies_chunks(p.v, p.v_dim, 2))
    return cudaErrorNotSupported;
  HopperMaps maps;
  maps.box_slots = box_slots;
  cudaError_t error = describe(tensor_of(p, p.k, p.dim, box_slots), &maps.keys);
  if (error == cudaSuccess) error = describe(tensor_of(p, p.v, p.v_dim, box_slots), &maps.values);
  if (error != cudaSuccess) return error;
  cudaStream_t on = static_cast<cudaStream_t>(stream);
  return p.dtype == DType::f16 ? launch_element<Half>(p, plan, maps, on)
                               : launch_element<BFloat16>(p, plan, maps, on);
}

}  // namespace specdec
