#include "commit_kv/commit_kv.h"

#include <cstdint>

#include "common/device_guard.cuh"
#include "common/launch.cuh"

namespace specdec {
namespace {

constexpr int kThreads = 128;
constexpr int kRowsInFlight =
    4;  // loads that are under way together: one load has no latency to hide in

struct Row {
  char* base;
  const int64_t* shape;
  const int64_t* stride;
  const int32_t* path;
  const int32_t* pages;  // nullptr without a block table
  int64_t batch_index;
  int32_t prefix;
  int32_t kept;
  int64_t item_size;

  __device__ char* at(int64_t head, uint32_t slot) const {
    int64_t offset;
    if (pages == nullptr) {
      offset = batch_index * stride[0] + head * stride[1] + slot * stride[2];
    } else {
      const uint32_t page_size = shape[1];  // 32 bits, as slots are: 64-bit divisions are slow
      offset =
          pages[slot / page_size] * stride[0] + slot % page_size * stride[1] + head * stride[2];
    }
    return base + offset * item_size;
  }
};

// One thread moves the same word of every kept row, in order. Reading some rows ahead is safe: a
// row is read from path[i] > i, and all that has been written by then lies before i.
template <class Word>
__device__ void move_word(const Row& row, int64_t head, int64_t word) {
  for (int32_t first = 0; first < row.kept; first += kRowsInFlight) {
    int32_t source[kRowsInFlight];  // 0 for a row that stays
    Word held[kRowsInFlight];
#pragma unroll
    for (int j = 0; j < kRowsInFlight; ++j) {
      const int32_t i = first + j;
      source[j] = i < row.kept && row.path[i] > i ? row.path[i] : 0;
      if (source[j] != 0)
        held[j] = reinterpret_cast<const Word*>(row.at(head, row.prefix + source[j]))[word];
    }
#pragma unroll
    for (int j = 0; j < kRowsInFlight; ++j)
      if (source[j] != 0)
        reinterpret_cast<Word*>(row.at(head, row.prefix + first + j))[word] = held[j];
  }
}

template <class Word>
__device__ void move_rows(const Row& row, int64_t heads, int64_t bytes) {
  const uint32_t words = bytes / sizeof(Word);
  for (uint32_t item = threadIdx.x; item < heads * words; item += kThreads)
    move_word<Word>(row, item / words, item % words);
}

// One block for each cache tensor and batch row.
__global__ void __launch_bounds__(kThreads) commit_kv_kernel(const CommitKvParams p) {
  const int64_t cache = blockIdx.x / static_cast<uint32_t>(p.batch);
  const int64_t b = blockIdx.x % static_cast<uint32_t>(p.batch);
  const int64_t* shape = p.shapes + 4 * cache;
  const int64_t* stride = p.strides + 4 * cache;
  const bool paged = p.block_table != nullptr;
  const Row row{static_cast<char*>(p.caches[cache]),
                shape,
                stride,
                p.path + b * p.path_stride,
                paged ? p.block_table + b * p.block_table_stride : nullptr,
                b,
                p.prefix_len[b],
                p.num_kept[b],
                p.item_size};
  const int64_t heads = shape[paged ? 2 : 1];
  const int64_t bytes = shape[3] * p.item_size;
  const int64_t steps = (stride[0] | stride[1] | stride[2]) * p.item_size;
  const int64_t alignment = reinterpret_cast<int64_t>(row.base) | steps | bytes;
  if (alignment % 16 == 0) {
    move_rows<uint4>(row, heads, bytes);
  } else if (alignment % 4 == 0) {
    move_rows<uint32_t>(row, heads, bytes);
  } else {
    move_rows<uint16_t>(row, heads, bytes);
  }
}

}  // namespace

int commit_kv_cuda(const CommitKvParams& p, const CudaLaunch& launch) {
  const int64_t blocks = p.num_caches * p.batch;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const DeviceGuard guard(launch.device);
  if (guard.error() != cudaSuccess) return guard.error();
  return specdec::launch(commit_kv_kernel, static_cast<unsigned>(blocks), kThreads, 0,
                         static_cast<cudaStream_t>(launch.stream), p);
}

}  // namespace specdec
