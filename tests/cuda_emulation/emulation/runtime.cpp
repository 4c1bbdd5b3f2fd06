#include "emulation/runtime.h"

#include <cstring>
#include <map>

#include "emulation/intrinsics.h"

namespace cuda_emulation {
namespace {

constexpr int kMultiprocessors = 8;  // few, so that kernels meet more work than one wave of blocks
constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kMaxBlocks = 0x7fffffff, kMaxBlocksYZ = 65535;

std::map<const void*, size_t>& allowed() {
  static std::map<const void*, size_t> bytes_of_kernel;
  return bytes_of_kernel;
}

}  // namespace

cudaError_t allow_dynamic_shared(const void* kernel, size_t bytes) {
  if (bytes > kSharedLimit) return cudaErrorInvalidValue;
  allowed()[kernel] = bytes;
  return cudaSuccess;
}

cudaError_t check_launch(const cudaLaunchConfig_t& config, const void* kernel) {
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  if (config.numAttrs != 0) return cudaErrorInvalidValue;  // clusters and the like
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads) return cudaErrorInvalidConfiguration;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaErrorInvalidConfiguration;
  if (grid.x > kMaxBlocks || grid.y > kMaxBlocksYZ || grid.z > kMaxBlocksYZ)
    return cudaErrorInvalidConfiguration;
  const auto found = allowed().find(kernel);
  const size_t limit = found == allowed().end() ? kStaticSharedLimit : found->second;
  return config.dynamicSmemBytes > limit ? cudaErrorInvalidValue : cudaSuccess;
}

}  // namespace cuda_emulation

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorNotSupported:
      return "operation not supported";
  }
  return "unrecognized error code";
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return cudaErrorInvalidDevice;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = cuda_emulation::kMultiprocessors;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = int(cuda_emulation::kSharedLimit);
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 8;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

void __trap() { throw cuda_emulation::Fault("__trap()"); }
