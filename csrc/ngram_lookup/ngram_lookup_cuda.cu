// Every block finds the best matches among a chunk of a row's positions; the last block of the row
// to finish picks the best of all and copies what follows them. Ranks are one 64-bit key, so the
// result doesn't depend on how the row is cut or which block is last.
#include "ngram_lookup/ngram_lookup.h"

#include "common/device_guard.cuh"
#include "common/element.cuh"
#include "common/launch.cuh"

namespace specdec {
namespace {

// Of a match: its length, then its rank among equal lengths. 0 is no match.
using Key = unsigned long long;

constexpr int kThreads = 256;
constexpr int kPack = 4;      // tokens of one load
constexpr int kChunk = 2048;  // positions per block: two loads of every thread are under way
constexpr unsigned kAllLanes = 0xffffffffu;

// Zeroed memory: [batch] tickets, then the best keys so far, [batch] of them when one match is
// asked for and else [batch, chunks, num_matches].
struct Workspace {
  Key* tickets;
  Key* keys;
};

// One row; `last` is the position of its last token.
struct Text {
  const int32_t* tokens;
  int64_t last;
  int64_t k;
  bool latest;

  __device__ Text(const NgramLookupParams& p, int64_t b)
      : tokens(p.tokens + b * p.tokens_stride),
        last(min(int64_t(p.lens[b]), p.max_len) - 1),
        k(p.k),
        latest(p.latest) {}

  __device__ Key key_of(int64_t end, int64_t min_n, int64_t max_n) const {
    int64_t length = 0;
    while (length < max_n && length <= end && tokens[end - length] == tokens[last - length])
      ++length;
    if (length < min_n) return 0;
    const uint32_t place = static_cast<uint32_t>(end);
    return static_cast<Key>(length) << 32 | (latest ? place + 1 : ~place);
  }
  __device__ int64_t end_of(Key key) const {
    const uint32_t rank = static_cast<uint32_t>(key);
    return latest ? rank - 1 : ~rank;
  }
  __device__ bool same_draft(Key a, Key b) const {
    const int64_t end_a = end_of(a), end_b = end_of(b);
    int64_t i = end_a, j = end_b;
    for (int64_t drafted = 0; drafted < k; ++drafted) {
      i = i == last ? end_a + 1 : i + 1;  // from the end on periodically
      j = j == last ? end_b + 1 : j + 1;
      if (tokens[i] != tokens[j]) return false;
    }
    return true;
  }
};

// The largest key of the block, in every thread.
__device__ Key largest_of_block(Key key) {
  SPECDEC_SHARED(Key[kThreads / 32], of_warps);
  for (int step = 16; step > 0; step /= 2) key = max(key, __shfl_xor_sync(kAllLanes, key, step));
  __syncthreads();  // those of the call before have been read
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = key;
  __syncthreads();
  for (const Key other : of_warps) key = max(key, other);
  return key;
}

// see(position) for positions [begin, end) whose token is the last one, dealt out in loads of 16
// bytes.
template <class See>
__device__ void scan(const Text& text, int64_t begin, int64_t end, const See& see) {
  const int32_t* tokens = text.tokens;
  const int32_t token = tokens[text.last];
  const int64_t misaligned = reinterpret_cast<uintptr_t>(tokens + begin) / sizeof(int32_t) % kPack;
  const int64_t first = min(end, begin + (kPack - misaligned) % kPack);
  const int64_t whole = first + (end - first) / kPack * kPack;
  const auto look = [&](int64_t i) {
    if (tokens[i] == token) see(i);
  };
  if (begin + threadIdx.x < first) look(begin + threadIdx.x);
  int4 packs[kChunk / kPack / kThreads];
#pragma unroll
  for (int turn = 0; turn < kChunk / kPack / kThreads; ++turn) {
    const int64_t i = first + (turn * kThreads + threadIdx.x) * kPack;
    if (i < whole) packs[turn] = *reinterpret_cast<const int4*>(tokens + i);
  }
#pragma unroll
  for (int turn = 0; turn < kChunk / kPack / kThreads; ++turn) {
    const int64_t i = first + (turn * kThreads + threadIdx.x) * kPack;
    if (i >= whole) break;
    const int4& pack = packs[turn];
    if (pack.x == token) see(i);
    if (pack.y == token) see(i + 1);
    if (pack.z == token) see(i + 2);
    if (pack.w == token) see(i + 3);
  }
  if (whole + threadIdx.x < end) look(whole + threadIdx.x);
}

// The best keys with different drafts, best first, then zeros. Overwrites `keys`, each thread its
// own.
__device__ void select(const Text& text, Key* keys, int64_t count, Key* best, int num_matches) {
  Key found = 1;
  for (int i = 0; i < num_matches; ++i) {
    Key own = 0;
    for (int64_t j = threadIdx.x; j < count && found != 0; j += kThreads)
      own = max(own, __ldcg(keys + j));
    if (found != 0) found = largest_of_block(own);
    if (threadIdx.x == 0) best[i] = found;
    if (found == 0 || i + 1 == num_matches) continue;
    for (int64_t j = threadIdx.x; j < count; j += kThreads) {
      const Key key = __ldcg(keys + j);
      if (key != 0 && (key == found || text.same_draft(key, found))) keys[j] = 0;
    }
  }
}

// Blocks of a row with so many positions: one at least, to write the outputs.
__host__ __device__ int64_t chunks_of(int64_t positions) {
  return max((positions + kChunk - 1) / kChunk, int64_t(1));
}

// Whether all other blocks of the row have published their keys.
__device__ bool is_last_of_row(Key* ticket, int64_t blocks) {
  SPECDEC_SHARED(bool, last);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(ticket, Key(1)) + 1 == static_cast<Key>(blocks);
  __syncthreads();
  __threadfence();
  return last;
}

// The drafts of `best`, in shared memory.
__device__ void write_row(const NgramLookupParams& p, const Text& text, int64_t b,
                          const Key* best) {
  const int64_t items = p.num_matches * p.k;
  for (int64_t item = threadIdx.x; item < items; item += kThreads) {
    const Key key = best[item / p.k];
    int64_t token = -1;
    if (key != 0) {
      const int64_t end = text.end_of(key), period = text.last - end;
      token = text.tokens[end + 1 + item % p.k % period];
    }
    p.draft_token_ids[b * items + item] = token;
  }
  for (int i = threadIdx.x; i < p.num_matches; i += kThreads)
    p.num[b * p.num_matches + i] = best[i] != 0 ? static_cast<int32_t>(p.k) : 0;
}

// One block per (chunk, row); one match of each row is wanted.
__global__ void __launch_bounds__(kThreads)
    ngram_lookup_kernel(const NgramLookupParams p, const Workspace space) {
  const int64_t b = blockIdx.y, begin = int64_t(blockIdx.x) * kChunk;
  const Text text(p, b);
  const int64_t positions = max(text.last, int64_t(0));
  if (begin >= positions && blockIdx.x > 0) return;
  SPECDEC_SHARED(Key, best);
  Key own = 0;
  if (begin < positions)
    scan(text, begin, min(begin + kChunk, positions),
         [&](int64_t end) { own = max(own, text.key_of(end, p.min_n, p.max_n)); });
  own = largest_of_block(own);
  if (threadIdx.x == 0 && own != 0) atomicMax(space.keys + b, own);
  if (!is_last_of_row(space.tickets + b, chunks_of(positions))) return;
  if (threadIdx.x == 0) best = __ldcg(space.keys + b);
  __syncthreads();
  write_row(p, text, b, &best);
}

// The same for several matches. A block's best keys suffice: what ranks behind num_matches
// different drafts in its own chunk does so in the row. With 1 block per multiprocessor as the aim,
// ptxas spills nothing.
__global__ void __launch_bounds__(kThreads, 1)
    ngram_lookups_kernel(const NgramLookupParams p, const Workspace space) {
  const int64_t b = blockIdx.y, begin = int64_t(blockIdx.x) * kChunk;
  const Text text(p, b);
  const int64_t positions = max(text.last, int64_t(0));
  if (begin >= positions && blockIdx.x > 0) return;
  SPECDEC_SHARED(Key[kChunk], keys);
  SPECDEC_SHARED(Key[kMaxNgramMatches], best);
  for (int i = threadIdx.x; i < kChunk; i += kThreads) keys[i] = 0;
  __syncthreads();
  if (begin < positions)
    scan(text, begin, min(begin + kChunk, positions),
         [&](int64_t end) { keys[end - begin] = text.key_of(end, p.min_n, p.max_n); });
  __syncthreads();
  Key* of_row = space.keys + b * gridDim.x * p.num_matches;
  select(text, keys, min(int64_t(kChunk), positions), of_row + blockIdx.x * p.num_matches,
         p.num_matches);
  const int64_t chunks = chunks_of(positions);
  if (!is_last_of_row(space.tickets + b, chunks)) return;
  select(text, of_row, chunks * p.num_matches, best, p.num_matches);
  __syncthreads();
  write_row(p, text, b, best);
}

}  // namespace

int64_t ngram_lookup_workspace(int64_t batch, int64_t max_len, int num_matches) {
  return batch * (1 + (num_matches == 1 ? 1 : chunks_of(max_len) * num_matches));
}

int ngram_lookup_cuda(const NgramLookupParams& p, void* workspace, const CudaLaunch& where) {
  if (p.batch == 0) return cudaSuccess;
  const int64_t chunks = chunks_of(p.max_len);
  if (p.num_matches > kMaxNgramMatches || p.batch > 65535 || chunks > INT32_MAX)
    return cudaErrorInvalidValue;
  const DeviceGuard guard(where.device);
  if (guard.error() != cudaSuccess) return guard.error();
  Key* words = static_cast<Key*>(workspace);
  const dim3 grid(static_cast<unsigned>(chunks), static_cast<unsigned>(p.batch));
  return launch(p.num_matches == 1 ? ngram_lookup_kernel : ngram_lookups_kernel, grid,
                dim3(kThreads), 0, static_cast<cudaStream_t>(where.stream), p,
                Workspace{words, words + p.batch});
}

}  // namespace specdec
