// What one thread block computes: which rows, which keys, and which of them a row sees.
//
// The rows of a KV head are the T * G pairs of (window slot, query head of the group), slot by
// slot. Keys are counted from the start of the cache row; tiles of keys lie on a grid from key 0,
// so that a key's place in its tile never depends on where the window begins.
#pragma once

#include <cuda_runtime.h>

#include "tree_attention/tree_attention.h"

namespace specdec {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWordKeys = 64;        // of a word of visibility bits, and the grid of fixed splits
constexpr int kShortestSplit = 128;  // keys: a shorter one costs more in the combine than it saves

template <class E>
__host__ __device__ inline const E& at(const AttentionView& view, int64_t i, int64_t j = 0,
                                       int64_t k = 0) {
  return static_cast<const E*>(
      view.data)[i * view.stride[0] + j * view.stride[1] + k * view.stride[2]];
}

__host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The lowest n bits; n may lie outside 0..64.
__device__ inline uint64_t low_bits(int n) {
  return n >= 64 ? ~uint64_t(0) : n <= 0 ? 0 : (uint64_t(1) << n) - 1;
}

struct AttentionUnit {
  int64_t batch;
  int kv_head;
  int row_block;
  int group;      // query heads per KV head
  int first_row;  // of the KV head's rows
  int rows;       // that exist
  int live_rows;  // of slots below num_nodes
  int prefix;
  int nodes;
  int key_begin, key_end;  // no row sees a key outside
  int open_begin;          // from here to the prefix's end every row sees every key
  int splits;              // that have keys
  int split;               // of this block; not below `splits`: nothing to do
  int tile_begin, tile_end;

  __device__ int slot_of(int row) const { return (first_row + row) / group; }
  __device__ int head_of(int row) const { return kv_head * group + (first_row + row) % group; }
};

// Positions relative to the prefix's end.
__device__ inline int depth_of(const TreeAttentionParams& p, const AttentionUnit& u, int slot) {
  return p.tree_mask.data == nullptr ? slot : at<int32_t>(p.depth, u.batch, slot);
}

// The lowest key of the prefix that a node of this depth sees.
__device__ inline int lowest_key(const TreeAttentionParams& p, int prefix, int depth) {
  const int64_t lowest = p.window == 0 ? 0 : int64_t(prefix) + depth - p.window + 1;
  return static_cast<int>(max(int64_t(0), min(int64_t(prefix), lowest)));
}

// The range of keys; a whole warp.
__device__ inline void find_keys(const TreeAttentionParams& p, AttentionUnit& u) {
  const int first_slot = u.slot_of(0), last_slot = u.slot_of(u.live_rows - 1);
  int shallow = first_slot, deep = last_slot;
  if (p.window != 0 && p.tree_mask.data != nullptr) {
    shallow = INT32_MAX, deep = 0;
    for (int slot = first_slot + threadIdx.x % 32; slot <= last_slot; slot += 32) {
      const int depth = depth_of(p, u, slot);
      shallow = min(shallow, depth), deep = max(deep, depth);
    }
    for (int step = 16; step > 0; step /= 2) {
      shallow = min(shallow, __shfl_xor_sync(kAllLanes, shallow, step));
      deep = max(deep, __shfl_xor_sync(kAllLanes, deep, step));
    }
  }
  u.key_begin = lowest_key(p, u.prefix, shallow);
  u.open_begin = lowest_key(p, u.prefix, deep);
  u.key_end = u.prefix + (p.tree_mask.data == nullptr ? last_slot + 1 : u.nodes);
}

// The tiles of this block. The splits of a fixed size lie on a grid from key 0; those without keys
// don't count.
__device__ inline void find_tiles(const TreeAttentionParams& p, int tile_keys, int max_splits,
                                  AttentionUnit& u) {
  const int begin = u.key_begin / tile_keys;
  const int end = static_cast<int>(ceil_div(u.key_end, tile_keys));
  int size, origin;
  if (p.split_size > 0) {
    size = static_cast<int>(ceil_div(p.split_size, kWordKeys)) * (kWordKeys / tile_keys);
    origin = begin / size * size;
  } else {
    size = static_cast<int>(
        max(ceil_div(end - begin, max_splits), int64_t(kShortestSplit / tile_keys)));
    origin = begin;
  }
  u.splits = static_cast<int>(ceil_div(end - origin, size));
  u.tile_begin = max(begin, origin + u.split * size);
  u.tile_end = min(end, origin + (u.split + 1) * size);
}

// A block of a grid (row blocks * splits, KV heads, batch); a whole warp.
__device__ inline AttentionUnit make_unit(const TreeAttentionParams& p, int block_rows,
                                          int tile_keys, int row_block, int split, int max_splits) {
  AttentionUnit u;
  u.batch = blockIdx.z;
  u.kv_head = blockIdx.y;
  u.row_block = row_block;
  u.split = split;
  u.group = static_cast<int>(p.q_heads / p.kv_heads);
  u.first_row = u.row_block * block_rows;
  u.rows = min(block_rows, static_cast<int>(p.window_slots) * u.group - u.first_row);
  u.nodes = max(0, min(at<int32_t>(p.num_nodes, u.batch), static_cast<int>(p.window_slots)));
  u.live_rows = max(0, min(u.rows, u.nodes * u.group - u.first_row));
  u.splits = u.tile_begin = u.tile_end = 0;
  if (u.live_rows == 0) return u;  // the prefix of a finished row may be anything
  u.prefix = at<int32_t>(p.prefix_len, u.batch);
  find_keys(p, u);
  find_tiles(p, tile_keys, max_splits, u);
  return u;
}

// Whether every row sees every key of a tile, so that no mask is needed.
__device__ inline bool is_open(const AttentionUnit& u, int first_key, int keys) {
  return first_key >= u.open_begin && first_key + keys <= u.prefix;
}

// 64 bits of a row of ancestor words, from bit `offset`, which may be negative.
__device__ inline uint64_t mask_bits(const TreeAttentionParams& p, const AttentionUnit& u, int slot,
                                     int offset) {
  const int word = offset >> 6, shift = offset & 63;
  const auto read = [&](int w) -> uint64_t {
    if (w < 0 || w >= p.mask_words) return 0;
    return static_cast<uint64_t>(at<int64_t>(p.tree_mask, u.batch, slot, w));
  };
  const uint64_t low = read(word) >> shift;
  return shift == 0 ? low : low | read(word + 1) << (64 - shift);
}

// Bit i: whether the node at `slot` sees key first_key + i. A window hides by position: nodes of a
// tree stand at prefix + depth, wherever their slots are.
__device__ inline uint64_t visible_keys(const TreeAttentionParams& p, const AttentionUnit& u,
                                        int slot, int first_key) {
  const bool chain = p.tree_mask.data == nullptr;
  const int offset = first_key - u.prefix;  // the window slot of bit 0
  const uint64_t prefix = low_bits(-offset);
  uint64_t seen =
      chain ? low_bits(slot + 1 - offset) : (mask_bits(p, u, slot, offset) & ~prefix) | prefix;
  seen &= low_bits(u.nodes - offset);
  if (p.window == 0) return seen;
  const int depth = depth_of(p, u, slot);
  const int64_t hidden = int64_t(u.prefix) + depth - p.window + 1 - first_key;  // positions below
  const uint64_t before = low_bits(static_cast<int>(max(int64_t(-1), min(hidden, int64_t(64)))));
  if (chain) return seen & ~before;
  seen &= ~(before & prefix);
  if (p.window > depth) return seen;
  for (int i = max(0, -offset); i < 64 && offset + i < u.nodes; ++i)
    if (depth - depth_of(p, u, offset + i) >= p.window) seen &= ~(uint64_t(1) << i);
  return seen;
}

}  // namespace specdec
