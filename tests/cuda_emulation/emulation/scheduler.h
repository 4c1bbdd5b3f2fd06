// Runs the threads of a kernel, block after block, and lets them wait for each other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>

#include "emulation/types.h"

extern dim3 gridDim, blockDim;
extern uint3 blockIdx, threadIdx;
constexpr int warpSize = 32;

namespace cuda_emulation {

// What a kernel did wrong; thrown by the launch.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A place in a kernel. As a default argument `Where where = here()` it is the caller's.
struct Where {
  const char* file;
  int line;

  bool operator!=(const Where& other) const {
    return line != other.line || (file != other.file && std::strcmp(file, other.file) != 0);
  }
  std::string text() const { return std::string(file) + ":" + std::to_string(line); }
};
constexpr Where here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return {file, line};
}

constexpr unsigned kWarp = 32;
constexpr size_t kStaticSharedLimit = 48 << 10;
constexpr size_t kSharedLimit = 227 << 10;

// ---- memory

// Static shared memory of the block that runs; `site` tells declarations apart.
void* shared_memory(const void* site, size_t size, size_t alignment);
// Its dynamic shared memory, exactly as large as launched.
unsigned char* dynamic_shared_memory();

// ---- waiting

struct BarrierResult {
  int any, all, count;
};

// Barrier 0 waits for every thread that has not left the kernel, the others for `threads` of them.
BarrierResult wait_at_barrier(unsigned barrier, unsigned threads, int predicate, bool blocks,
                              Where where);

// What one lane brings to a meeting of its warp and takes from it.
using Payload = std::array<uint32_t, 16>;
struct Lanes {
  uint32_t mask;
  std::array<const Payload*, kWarp> given;  // null for lanes outside the mask
  std::array<Payload*, kWarp> taken;
};
// All lanes in mask meet; the last one computes what each takes away.
Payload meet(uint32_t mask, const char* operation, const Payload& given,
             void (*compute)(const Lanes&), Where where);

// Lets other threads go first, now and then, under a random schedule.
void maybe_yield();
// Lets them, for a thread that waits for what they do.
void let_others_go();

// ---- copies under way, of the thread that runs

// The bytes land when the thread waits for them, not before.
void begin_copy(void* to, const void* from, size_t bytes, size_t bytes_read);
void commit_copies();
void wait_for_copies(size_t groups_left);

// ---- launching

// The order in which threads and blocks take turns: 0 forwards, 1 backwards, from 2 on random
// (each number another order).
void set_schedule(unsigned schedule);

// Throws Fault.
void run_kernel(dim3 grid, dim3 block, size_t dynamic_shared, const std::function<void()>& kernel);

}  // namespace cuda_emulation

inline void __syncthreads(cuda_emulation::Where where = cuda_emulation::here()) {
  cuda_emulation::wait_at_barrier(0, 0, 0, true, where);
}
inline int __syncthreads_or(int predicate, cuda_emulation::Where where = cuda_emulation::here()) {
  return cuda_emulation::wait_at_barrier(0, 0, predicate, true, where).any;
}
inline int __syncthreads_and(int predicate, cuda_emulation::Where where = cuda_emulation::here()) {
  return cuda_emulation::wait_at_barrier(0, 0, predicate, true, where).all;
}
inline int __syncthreads_count(int predicate,
                               cuda_emulation::Where where = cuda_emulation::here()) {
  return cuda_emulation::wait_at_barrier(0, 0, predicate, true, where).count;
}
