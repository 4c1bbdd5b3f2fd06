// What the threads of a block do together in the sampling kernels. Every function here is called by
// all of them.
#pragma once

#include "common/device.cuh"
#include "common/launch.cuh"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

using Key = unsigned long long;  // what 64-bit atomics take

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

struct Largest {
  template <class V>
  static SPECDEC_INLINE V of(V a, V b) {
    return b > a ? b : a;
  }
};
struct Sum {
  template <class V>
  static SPECDEC_INLINE V of(V a, V b) {
    return a + b;
  }
};

template <class Operation, class V>
__device__ V reduce_warp(V value) {
  for (int step = 16; step > 0; step /= 2)
    value = Operation::of(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

// Every thread receives the result.
template <class Operation, class V>
__device__ V reduce_block(V value) {
  SPECDEC_SHARED(V[kWarps], parts);
  value = reduce_warp<Operation>(value);
  __syncthreads();  // the parts of the call before may still be read
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  V total = parts[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) total = Operation::of(total, parts[warp]);
  return total;
}

// True in the block that is the last of `expected` to call with this ticket, which starts at 0.
// What the others wrote to global memory before can be read there, past the first cache (__ldcg).
__device__ inline bool is_last_block(Key* ticket, int64_t expected) {
  SPECDEC_SHARED(bool, is_last);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(ticket, Key(1)) + 1 == static_cast<Key>(expected);
  __syncthreads();
  const bool result = is_last;
  __syncthreads();
  __threadfence();
  return result;
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
