// Launches and shared memory in the one spelling that nvcc and the emulation in
// tests/cuda_emulation both understand.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

namespace specdec {

// Runs kernel(args...); an argument is converted to the kernel's parameter before it is copied.
template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t dynamic_shared,
                   cudaStream_t stream, Args&&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = dynamic_shared;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

// Must come before a launch with more than 48 KB of dynamic shared memory.
template <class... Params>
cudaError_t allow_dynamic_shared(void (*kernel)(Params...), size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

template <class T>
using Itself = T;

// SPECDEC_SHARED(float[32], sums) declares an array in shared memory; the type must need no
// constructor. dynamic_shared() is the start of the memory that the launch asked for, aligned to
// 128 bytes.
#if defined(SPECDEC_CUDA_EMULATED)

#define SPECDEC_SHARED(Type, name)                     \
  static const char name##_site = 0;                   \
  auto& name = *static_cast<::specdec::Itself<Type>*>( \
      ::cuda_emulation::shared_memory(&name##_site, sizeof(Type), alignof(Type)))

inline unsigned char* dynamic_shared() { return cuda_emulation::dynamic_shared_memory(); }

#else

#define SPECDEC_SHARED(Type, name) __shared__::specdec::Itself<Type> name

__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char specdec_dynamic_shared[];
  return specdec_dynamic_shared;
}

#endif

}  // namespace specdec
