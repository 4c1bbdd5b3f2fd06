// Picks the kernel for a plan.
#pragma once

#include "tree_attention/mma_kernel.cuh"

namespace specdec {

template <class C>
cudaError_t launch_mma_config(const TreeAttentionParams& p, const TreeAttentionPlan& plan,
                              const AttentionWorkspace& space, cudaStream_t stream) {
  if (plan.block_rows != C::kRows) return cudaErrorInvalidValue;
  const int64_t item = sizeof(typename C::Element);
  const MmaOptions options{copies_chunks(p.q, p.dim, item), copies_chunks(p.k, p.dim, item),
                           copies_chunks(p.v, p.v_dim, item)};
  const dim3 grid(static_cast<unsigned>(plan.row_blocks * plan.splits),
                  static_cast<unsigned>(p.kv_heads), static_cast<unsigned>(p.batch));
  const auto kernel = mma_attention_kernel<C>;
  const cudaError_t error = allow_dynamic_shared(kernel, C::kSharedBytes);
  if (error != cudaSuccess) return error;
  return launch(kernel, grid, dim3(C::kThreads), C::kSharedBytes, stream, p, space, options);
}

template <class Element, int kDim>
cudaError_t launch_mma_dim(const TreeAttentionParams& p, const TreeAttentionPlan& plan,
                           const AttentionWorkspace& space, cudaStream_t stream) {
  constexpr bool kIsFloat = sizeof(Element) == 4;
  constexpr int kKeyWarps = kDim <= 128 ? 4 : 2;
  if (plan.key_warps)
    return launch_mma_config<MmaConfig<Element, kDim, 1, 1, kKeyWarps>>(p, plan, space, stream);
  if constexpr (!kIsFloat) {
    constexpr int kRowTiles = kDim <= 128 ? 2 : 1;  // 256 rows, or 128
    if (plan.block_rows > 64)
      return launch_mma_config<MmaConfig<Element, kDim, 8, kRowTiles, 1>>(p, plan, space, stream);
  }
  return launch_mma_config<MmaConfig<Element, kDim, 4, 1, 1>>(p, plan, space, stream);
}

// Instantiated in mma_bf16.cu, mma_f16.cu and mma_f32.cu, which compile side by side.
template <class Element>
cudaError_t launch_mma(const TreeAttentionParams& p, const TreeAttentionPlan& plan,
                       const AttentionWorkspace& space, cudaStream_t stream) {
  switch (plan.dim) {
    case 64:
      return launch_mma_dim<Element, 64>(p, plan, space, stream);
    case 96:
      return launch_mma_dim<Element, 96>(p, plan, space, stream);
    case 128:
      return launch_mma_dim<Element, 128>(p, plan, space, stream);
    case 192:
      return launch_mma_dim<Element, 192>(p, plan, space, stream);
    case 256:
      return launch_mma_dim<Element, 256>(p, plan, space, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace specdec
