// Copies from global to shared memory that go on while the thread does other things (cp.async, from
// sm_80 on). A thread sees its own copies after cp_async_wait; other threads need a barrier after
// that.
#pragma once

#include <cuda_runtime.h>

namespace specdec {

// 16 bytes, both addresses aligned to 16; with reads = false the source is not read and zeros
// arrive.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool reads = true) {
#if defined(SPECDEC_CUDA_EMULATED)
  cuda_emulation::cp_async_16(shared, global, reads);
#else
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global),
               "r"(reads ? 16 : 0)
               : "memory");
#endif
}

// Ends a group: all copies since the last one.
__device__ __forceinline__ void cp_async_commit() {
#if defined(SPECDEC_CUDA_EMULATED)
  cuda_emulation::commit_copies();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until at most the kGroupsLeft newest groups are under way.
template <int kGroupsLeft>
__device__ __forceinline__ void cp_async_wait() {
#if defined(SPECDEC_CUDA_EMULATED)
  cuda_emulation::wait_for_copies(kGroupsLeft);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroupsLeft) : "memory");
#endif
}

}  // namespace specdec
