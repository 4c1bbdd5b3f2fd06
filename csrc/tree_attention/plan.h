// How a call is cut into units, splits and blocks of keys, and which keys a slot sees.
#pragma once

#include "common/vec.h"
#include "tree_attention/items.h"
#include "tree_attention/tree_attention.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

constexpr int kWordKeys = 64;    // a word of visibility bits; splits begin on a grid of these
constexpr int kBlockKeys = 128;  // between two updates of the maxima
constexpr int kBlockWords = kBlockKeys / kWordKeys;
constexpr int64_t kChunkRows = 256;       // query rows that one task takes, if it can
constexpr int64_t kSerialWork = 1 << 18;  // multiply-adds below which one thread is faster

template <class E>
SPECDEC_INLINE const E& at(const AttentionView& view, int64_t i, int64_t j = 0, int64_t k = 0) {
  return static_cast<const E*>(
      view.data)[i * view.stride[0] + j * view.stride[1] + k * view.stride[2]];
}

SPECDEC_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
SPECDEC_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
SPECDEC_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
SPECDEC_INLINE int64_t whole_vectors(int64_t n) { return ceil_div(n, kLanes) * kLanes; }
// The lowest n bits; n may lie outside 0..64.
SPECDEC_INLINE uint64_t low_bits(int64_t n) {
  return n >= 64 ? ~uint64_t(0) : n <= 0 ? 0 : (uint64_t(1) << n) - 1;
}

// How the call is cut into tasks; the same for every thread.
struct Plan {
  int64_t group;        // query heads per KV head
  int64_t chunk_slots;  // window slots per task
  int64_t chunks;
  int64_t units;
  int64_t rows;    // of a chunk, in whole vectors
  int64_t items;   // of a query or key, in whole vectors
  int64_t v_dim;   // in whole vectors
  int64_t splits;  // at most this many per row of the batch
  bool parallel_splits;
  int64_t part_floats;  // one partial result: out, maxima, denominators
  int num_threads;
  float* parts;        // [B, Hkv, chunks, splits, part_floats] when parallel_splits
  int32_t* remaining;  // [B, Hkv, chunks]: splits done
};

// The unnormalised result of some keys for the rows of a task.
struct Part {
  float* out;    // [rows, v_dim]
  float* max;    // [rows], in units of log 2
  float* denom;  // [rows]
};

struct Scratch {
  Item* queries;         // [rows, items]
  Item* q_panels;        // [panel][items, rows of the panel]
  float* out_panels;     // [panel][v_dim, rows of the panel]
  float* scores;         // few rows: [rows, kBlockKeys], a panel: [kBlockKeys, rows of the panel]
  float* score_columns;  // few rows and tiles: [kBlockKeys, 32]
  float* rescale;        // [rows]
  Item* keys;            // copies, or keys in columns
  Item* key_copies;
  Item* values;       // copies, or interleaved
  uint64_t* visible;  // [slots, kBlockWords]
  int32_t* words;     // [2 * kBlockWords, rows]
  float* parts;       // two partial results
};

// One (batch row, KV head, chunk of window slots).
struct Unit {
  int64_t b, kv_head, chunk;
  int64_t prefix, nodes;
  int64_t first_slot, live_slots, slots;  // live: below num_nodes
  int64_t key_begin, key_end;             // no row sees a key outside
  int64_t open_begin;                     // from here to the prefix's end all rows see all keys
  int64_t split_begin, split_size, splits;
};

int64_t lowest_key(const TreeAttentionParams& p, int64_t prefix, int64_t depth) {
  return p.window == 0 ? 0 : max64(0, min64(prefix, prefix + depth - p.window + 1));
}

int64_t depth_of(const TreeAttentionParams& p, int64_t b, int64_t slot) {
  return p.tree_mask.data == nullptr || p.depth.data == nullptr ? slot
                                                                : at<int32_t>(p.depth, b, slot);
}

Unit make_unit(const TreeAttentionParams& p, const Plan& plan, int64_t index) {
  Unit u;
  u.chunk = index % plan.chunks;
  u.kv_head = index / plan.chunks % p.kv_heads;
  u.b = index / plan.chunks / p.kv_heads;
  u.prefix = at<int32_t>(p.prefix_len, u.b);
  u.nodes = at<int32_t>(p.num_nodes, u.b);
  u.first_slot = u.chunk * plan.chunk_slots;
  u.slots = min64(plan.chunk_slots, p.window_slots - u.first_slot);
  u.live_slots = max64(0, min64(u.slots, u.nodes - u.first_slot));
  const int64_t total = u.nodes > 0 ? u.prefix + u.nodes : 0;
  int64_t shallow = p.window_slots, deep = 0;
  for (int64_t i = 0; p.window != 0 && i < u.live_slots; ++i) {
    const int64_t depth = depth_of(p, u.b, u.first_slot + i);
    shallow = min64(shallow, depth);
    deep = max64(deep, depth);
  }
  u.key_begin = lowest_key(p, u.prefix, shallow);
  u.open_begin = lowest_key(p, u.prefix, deep);
  u.key_end = p.tree_mask.data == nullptr ? u.prefix + u.first_slot + u.live_slots : total;
  if (p.split_size > 0) {
    u.split_begin = 0;
    u.split_size = ceil_div(p.split_size, kWordKeys) * kWordKeys;
  } else {
    u.split_begin = lowest_key(p, u.prefix, 0) / kWordKeys * kWordKeys;
    u.split_size =
        max64(1, ceil_div(ceil_div(total - u.split_begin, kWordKeys), plan.splits)) * kWordKeys;
  }
  u.splits = u.live_slots == 0 ? 1 : max64(1, ceil_div(total - u.split_begin, u.split_size));
  return u;
}

// Bit i is set when the row of window slot `slot` sees key word_begin + i.
uint64_t visible_keys(const TreeAttentionParams& p, const Unit& u, int64_t slot,
                      int64_t word_begin) {
  const int64_t from_prefix = u.prefix - word_begin;  // keys of this word in the prefix
  const int64_t depth = depth_of(p, u.b, slot);
  const int64_t lowest = p.window == 0 ? 0 : u.prefix + depth - p.window + 1;
  const uint64_t in_window = ~low_bits(lowest - word_begin);
  if (p.tree_mask.data == nullptr) return low_bits(from_prefix + slot + 1) & in_window;

  uint64_t bits = low_bits(from_prefix) & in_window;
  if (from_prefix >= kWordKeys) return bits;
  const int64_t start = -from_prefix;  // window slot of bit 0
  uint64_t tree;
  if (start <= 0) {
    tree = uint64_t(at<int64_t>(p.tree_mask, u.b, slot, 0)) << -start;
  } else {
    const int64_t word = start / 64, shift = start % 64;
    tree = word < p.mask_words ? uint64_t(at<int64_t>(p.tree_mask, u.b, slot, word)) >> shift : 0;
    if (shift != 0 && word + 1 < p.mask_words)
      tree |= uint64_t(at<int64_t>(p.tree_mask, u.b, slot, word + 1)) << (64 - shift);
  }
  tree &= low_bits(from_prefix + u.nodes);
  if (p.window != 0 && depth >= p.window) {
    for (uint64_t left = tree; left != 0; left &= left - 1) {
      const int bit = __builtin_ctzll(left);
      if (depth - depth_of(p, u.b, start + bit) >= p.window) tree &= ~(uint64_t(1) << bit);
    }
  }
  return bits | tree;
}

int64_t gcd(int64_t a, int64_t b) { return b == 0 ? a : gcd(b, a % b); }

Plan make_plan(const TreeAttentionParams& p, int elements_per_item) {
  Plan plan = {};
  plan.group = p.q_heads / p.kv_heads;
  plan.items = whole_vectors(ceil_div(p.dim, elements_per_item));
  plan.v_dim = whole_vectors(p.v_dim);
  const int64_t most = max64(1, kChunkRows / plan.group);
  plan.chunks = ceil_div(p.window_slots, most);
  plan.chunk_slots = ceil_div(p.window_slots, plan.chunks);
  plan.chunks = ceil_div(p.window_slots, plan.chunk_slots);
  plan.rows = whole_vectors(plan.chunk_slots * plan.group);
  plan.part_floats = plan.rows * (plan.v_dim + 2);

  int64_t longest = 0, work = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t nodes = at<int32_t>(p.num_nodes, b);
    const int64_t keys = nodes > 0 ? nodes + at<int32_t>(p.prefix_len, b) : 0;
    longest = max64(longest, keys);
    // To fetch a key takes as long as to multiply it with 16 rows.
    work += keys * (p.dim + p.v_dim) * max64(nodes * p.q_heads, 16 * p.kv_heads);
  }
  plan.num_threads = work < kSerialWork ? 1 : p.num_threads;
  const int64_t units = plan.units = p.batch * p.kv_heads * plan.chunks;
  const bool uneven = units % plan.num_threads != 0 && units < 8 * plan.num_threads;
  if (p.split_size > 0) {
    plan.splits = max64(1, ceil_div(longest, ceil_div(p.split_size, kWordKeys) * kWordKeys));
  } else {
    plan.splits = uneven ? plan.num_threads / gcd(units, plan.num_threads) : 1;
    plan.splits = max64(1, min64(plan.splits, ceil_div(longest, kWordKeys)));
  }
  plan.parallel_splits = uneven && plan.splits > 1;
  return plan;
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
