// The part of the CUDA runtime that launchers use, for one device, the CPU.
#pragma once

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

#include "emulation/scheduler.h"
#include "emulation/types.h"

using cudaStream_t = struct CudaEmulationStream*;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDevice = 101,
  cudaErrorNotSupported = 801
};

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9
};

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};

struct cudaLaunchAttribute;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream = nullptr);

namespace cuda_emulation {

cudaError_t allow_dynamic_shared(const void* kernel, size_t bytes);
// Whether a device would accept this launch.
cudaError_t check_launch(const cudaLaunchConfig_t& config, const void* kernel);

}  // namespace cuda_emulation

template <class... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute attribute,
                                 int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  return cuda_emulation::allow_dynamic_shared(reinterpret_cast<const void*>(kernel), size_t(value));
}

// Runs the kernel before it returns; throws cuda_emulation::Fault where the kernel is wrong.
template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  const cudaError_t error =
      cuda_emulation::check_launch(*config, reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) return error;
  const std::tuple<Params...> arguments(std::forward<Args>(args)...);
  cuda_emulation::run_kernel(config->gridDim, config->blockDim, config->dynamicSmemBytes,
                             [&] { std::apply(kernel, arguments); });
  return cudaSuccess;
}
