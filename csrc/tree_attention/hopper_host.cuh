// What the host does for a kernel of sm_90a: descriptions of tensors, launches in clusters.
#pragma once

#include "common/launch.cuh"
#include "tree_attention/hopper_ptx.cuh"

namespace specdec {

// Rows of 16-bit elements, [first, heads, slots, columns], in bytes between them; copied in boxes
// of [box_slots, box_columns].
struct TensorOfRows {
  const void* data;
  DType dtype;
  int64_t columns, slots, heads, first;
  int64_t slot_bytes, head_bytes, first_bytes;
  int box_columns, box_slots;
};

#if defined(SPECDEC_CUDA_EMULATED)

constexpr int kMostClusterBlocks = 1;
constexpr int kHopperMajor = 8;  // of the device that is emulated

inline cudaError_t describe(const TensorOfRows& t, TensorMap* map) {
  *map = {t.data,
          {t.columns, t.slots, t.heads, t.first},
          {t.slot_bytes, t.head_bytes, t.first_bytes},
          {t.box_columns, t.box_slots}};
  return cudaSuccess;
}

template <class... Params, class... Args>
cudaError_t launch_clusters(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared,
                            cudaStream_t stream, unsigned, Args&&... args) {
  return launch(kernel, grid, block, shared, stream, std::forward<Args>(args)...);
}

#else

constexpr int kMostClusterBlocks = 16;
constexpr int kHopperMajor = 9;

// The function is that of the driver which the runtime has loaded: nothing is linked.
inline cudaError_t describe(const TensorOfRows& t, TensorMap* map) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  const cuuint64_t shape[4] = {cuuint64_t(t.columns), cuuint64_t(t.slots), cuuint64_t(t.heads),
                               cuuint64_t(t.first)};
  const cuuint64_t strides[3] = {cuuint64_t(t.slot_bytes), cuuint64_t(t.head_bytes),
                                 cuuint64_t(t.first_bytes)};
  const cuuint32_t box[4] = {cuuint32_t(t.box_columns), cuuint32_t(t.box_slots), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const auto type =
      t.dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode(map, type, 4, const_cast<void*>(t.data), shape, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// In clusters of `cluster` blocks along x; more than 8 are allowed on request only.
template <class... Params, class... Args>
cudaError_t launch_clusters(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared,
                            cudaStream_t stream, unsigned cluster, Args&&... args) {
  if (cluster > 8) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

#endif

}  // namespace specdec
