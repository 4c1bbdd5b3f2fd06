// Every block finds the largest logit of a slice of one node's row; the last block of a batch row
// to finish walks the tree. The result does not depend on how rows are sliced or which block is
// last.
#include "verify_greedy/verify_greedy.h"

#include "common/device_guard.cuh"
#include "common/element.cuh"
#include "common/launch.cuh"

namespace specdec {
namespace {

using Key = unsigned long long;

constexpr int kThreads = 256;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int64_t kShortestSlice = 4096;  // elements; below that the atomics cost more than the row
constexpr int64_t kBlocksWanted = 512;    // a few for every multiprocessor of today's largest GPUs

// Zeroed memory of [batch, width] keys, [batch, width] NaN flags and [batch] tickets.
struct Workspace {
  Key* keys;
  Key* nan;
  Key* tickets;
};

struct Extreme {
  float largest = -kInfinity;  // NaN aside
  uint32_t id = 0;             // the lowest one that holds it
  bool has_nan = false;

  __device__ void see(float value, int64_t at) {
    has_nan = has_nan || value != value;
    if (value > largest) {
      largest = value;
      id = static_cast<uint32_t>(at);
    }
  }
};

// Orders as the floats do, then by falling id; 0 stands for "nothing above -infinity".
__device__ Key to_key(const Extreme& extreme) {
  if (extreme.largest == -kInfinity) return 0;
  const uint32_t bits = __float_as_uint(extreme.largest + 0.0f);  // -0 ties with 0
  const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (static_cast<Key>(ordered) << 32) | (0xffffffffu - extreme.id);
}
__device__ int64_t id_of(Key key) {
  return key == 0 ? 0 : 0xffffffffu - static_cast<uint32_t>(key);
}
__device__ bool is_infinity(Key key) { return key >> 32 == (0x7f800000u | 0x80000000u); }

// Elements [begin, end) of a row, dealt out in packs of 16 bytes.
template <class T>
__device__ Extreme scan(const T* row, int64_t begin, int64_t end) {
  constexpr int kPack = 16 / sizeof(T);
  Extreme extreme;
  const int64_t misaligned = reinterpret_cast<uintptr_t>(row + begin) / sizeof(T) % kPack;
  const int64_t first = min(end, begin + (kPack - misaligned) % kPack);
  const int64_t last = first + (end - first) / kPack * kPack;
  if (begin + threadIdx.x < first)
    extreme.see(to_float(row[begin + threadIdx.x]), begin + threadIdx.x);
#pragma unroll 4
  for (int64_t i = first + threadIdx.x * kPack; i < last; i += kThreads * kPack) {
    const Pack<T> pack = *reinterpret_cast<const Pack<T>*>(row + i);
#pragma unroll
    for (int j = 0; j < kPack; ++j) extreme.see(to_float(pack.values[j]), i + j);
  }
  if (last + threadIdx.x < end) extreme.see(to_float(row[last + threadIdx.x]), last + threadIdx.x);
  return extreme;
}

__device__ Key largest_of_warp(Key key) {
  for (int step = 16; step > 0; step /= 2) key = max(key, __shfl_xor_sync(kAllLanes, key, step));
  return key;
}

// For a row with both NaN and infinity. One warp.
template <class T>
__device__ int64_t largest_finite(const T* row, int64_t vocab) {
  Extreme extreme;
  for (int64_t i = threadIdx.x; i < vocab; i += 32) {
    const float value = to_float(row[i]);
    if (value < kInfinity) extreme.see(value, i);
  }
  return id_of(largest_of_warp(to_key(extreme)));
}

// The first child of `slot` that holds `token`, or -1. One warp.
__device__ int64_t child_with_token(const int64_t* tokens, const int32_t* parents, int64_t nodes,
                                    int64_t slot, int64_t token) {
  for (int64_t start = slot + 1; start < nodes; start += 32) {
    const int64_t child = start + threadIdx.x;
    const bool matches = child < nodes && parents[child] == slot && tokens[child] == token;
    const unsigned lanes = __ballot_sync(kAllLanes, matches);
    if (lanes != 0) return start + __ffs(lanes) - 1;
  }
  return -1;
}

// One warp follows the accepted path of batch row b and writes its outputs.
template <class T>
__device__ void walk(const VerifyGreedyParams& p, const Workspace& space, int64_t b,
                     int64_t nodes) {
  const int64_t width = p.window.width;
  const bool writes = threadIdx.x == 0;
  int32_t* path = p.acceptance.path + b * width;
  int64_t* output = p.acceptance.output_token_ids + b * width;
  int64_t length = 0;
  int32_t status = kRowOk;
  int64_t slot = nodes > 0 ? 0 : -1;
  while (slot >= 0) {
    const Key key = __ldcg(space.keys + b * width + slot);
    const bool has_nan = __ldcg(space.nan + b * width + slot) != 0;
    int64_t token = id_of(key);
    if (has_nan && is_infinity(key)) {
      const T* logits = static_cast<const T*>(p.logits);
      token = largest_finite(logits + b * p.stride_b + slot * p.stride_t, p.vocab);
    }
    status |= has_nan ? kRowNan : key == 0 ? kRowEmpty : kRowOk;
    if (writes) path[length] = static_cast<int32_t>(slot);
    if (writes) output[length] = token;
    ++length;
    slot = child_with_token(p.window.draft_token_ids + b * width, p.window.parents + b * width,
                            nodes, slot, token);
  }
  for (int64_t i = length + threadIdx.x; i < width; i += 32) path[i] = -1, output[i] = -1;
  if (writes) p.acceptance.num_accepted[b] = length > 0 ? static_cast<int32_t>(length - 1) : 0;
  if (writes) p.acceptance.status[b] = status;
}

// Merges what the threads of this block found; true in the block that was the last of its row.
__device__ bool publish(const Extreme& extreme, const Workspace& space, int64_t b, int64_t node,
                        int64_t blocks_of_row) {
  SPECDEC_SHARED(Key[kThreads / 32], keys);
  SPECDEC_SHARED(bool, is_last);
  const Key key = largest_of_warp(to_key(extreme));
  if (threadIdx.x % 32 == 0) keys[threadIdx.x / 32] = key;
  const bool has_nan = __syncthreads_or(extreme.has_nan);
  if (threadIdx.x == 0) {
    Key largest = 0;
    for (const Key candidate : keys) largest = max(largest, candidate);
    atomicMax(space.keys + node, largest);
    if (has_nan) atomicMax(space.nan + node, Key(1));
    __threadfence();
    is_last = atomicAdd(space.tickets + b, Key(1)) + 1 == static_cast<Key>(blocks_of_row);
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    verify_greedy_kernel(const VerifyGreedyParams p, const Workspace space, const uint32_t slices) {
  const int64_t width = p.window.width;
  const int64_t slice = blockIdx.x % slices;
  const int64_t node = blockIdx.x / slices;
  const int64_t b = node / width, slot = node - b * width;
  const int64_t nodes = min(max(int64_t(p.window.num_nodes[b]), int64_t(0)), width);
  if (nodes == 0 && slot == 0 && slice == 0 && threadIdx.x < 32) walk<T>(p, space, b, 0);
  if (slot >= nodes) return;

  const int64_t length = (p.vocab + slices - 1) / slices;
  const T* row = static_cast<const T*>(p.logits) + b * p.stride_b + slot * p.stride_t;
  const int64_t begin = min(slice * length, p.vocab);
  const Extreme extreme = scan(row, begin, min(begin + length, p.vocab));
  if (publish(extreme, space, b, node, nodes * slices) && threadIdx.x < 32)
    walk<T>(p, space, b, nodes);
}

template <class T>
cudaError_t launch_kernel(const VerifyGreedyParams& p, const Workspace& space,
                          cudaStream_t stream) {
  const int64_t nodes = p.window.batch * p.window.width;
  const int64_t wanted = (kBlocksWanted + nodes - 1) / nodes;
  const int64_t useful = (p.vocab + kShortestSlice - 1) / kShortestSlice;
  const int64_t slices = wanted < useful ? wanted : useful;
  if (nodes * slices > INT32_MAX) return cudaErrorInvalidValue;
  const unsigned blocks = static_cast<unsigned>(nodes * slices);
  return launch(verify_greedy_kernel<T>, blocks, kThreads, 0, stream, p, space,
                static_cast<uint32_t>(slices));
}

}  // namespace

int verify_greedy_cuda(const VerifyGreedyParams& p, void* workspace, const CudaLaunch& launch) {
  const int64_t nodes = p.window.batch * p.window.width;
  if (nodes == 0) return cudaSuccess;
  const DeviceGuard guard(launch.device);
  if (guard.error() != cudaSuccess) return guard.error();
  Key* words = static_cast<Key*>(workspace);
  const Workspace space{words, words + nodes, words + 2 * nodes};
  cudaStream_t stream = static_cast<cudaStream_t>(launch.stream);
  return with_element(
      p.dtype, [&](auto element) { return launch_kernel<decltype(element)>(p, space, stream); });
}

}  // namespace specdec
