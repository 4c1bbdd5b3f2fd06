#include "common/device_guard.cuh"
#include "tree_attention/hopper_kernel.cuh"
#include "tree_attention/hopper_launch.h"

namespace specdec {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// From the driver that the runtime has loaded: nothing is linked.
cudaError_t find_encode(Encode* encode) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  *encode = reinterpret_cast<Encode>(function);
  return found == cudaDriverEntryPointSuccess ? cudaSuccess : cudaErrorNotSupported;
}

// Keys or values as a tensor [first, heads, slots, columns], copied in boxes of [box_slots, 64].
cudaError_t make_map(Encode encode, const TreeAttentionParams& p, const AttentionView& view,
                     int64_t columns, int64_t slots, int64_t first, int box_slots,
                     CUtensorMap* map) {
  const cuuint64_t shape[4] = {cuuint64_t(columns), cuuint64_t(slots), cuuint64_t(p.kv_heads),
                               cuuint64_t(first)};
  const auto bytes = [&](int64_t stride) { return cuuint64_t(stride * item_size(p.dtype)); };
  const cuuint64_t strides[3] = {bytes(view.stride[2]), bytes(view.stride[1]),
                                 bytes(view.stride[0])};
  const cuuint32_t box[4] = {kBoxColumns, cuuint32_t(box_slots), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const auto type =
      p.dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode(map, type, 4, const_cast<void*>(view.data), shape, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <class C>
cudaError_t launch_config(const TreeAttentionParams& p, const TreeAttentionPlan& plan,
                          const HopperMaps& maps, cudaStream_t stream) {
  if (plan.block_rows != C::kRows) return cudaErrorInvalidValue;
  const auto kernel = hopper_attention_kernel<C>;
  cudaError_t error = allow_dynamic_shared(kernel, C::kSharedBytes);
  if (error == cudaSuccess && plan.splits > 8)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(plan.splits), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.row_blocks * plan.splits),
                        static_cast<unsigned>(p.kv_heads), static_cast<unsigned>(p.batch));
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = C::kSharedBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p, maps, static_cast<int>(plan.splits),
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
  const bool paged = p.block_table.data != nullptr;
  const int64_t first = paged ? p.num_pages : p.batch;
  const int64_t slots = paged ? p.page_size : p.cache_slots;
  HopperMaps maps;
  maps.box_slots = box_slots;
  Encode encode;
  cudaError_t error = find_encode(&encode);
  if (error == cudaSuccess)
    error = make_map(encode, p, p.k, p.dim, slots, first, box_slots, &maps.keys);
  if (error == cudaSuccess)
    error = make_map(encode, p, p.v, p.v_dim, slots, first, box_slots, &maps.values);
  if (error != cudaSuccess) return error;
  cudaStream_t on = static_cast<cudaStream_t>(stream);
  return p.dtype == DType::f16 ? launch_element<Half>(p, plan, maps, on)
                               : launch_element<BFloat16>(p, plan, maps, on);
}

}  // namespace specdec
