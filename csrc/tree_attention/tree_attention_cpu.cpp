// Flash-style attention over blocks of 64 keys, parallel over (batch, KV head, query chunk, split).
//
// The T * G query rows of a KV head share each K and V row they load. Blocks lie on a grid of 64
// slots and splits on a grid of split_size, and masked keys are exact no-ops; with a fixed
// split_size a row's result therefore depends on that row alone, not on T, batch or threads.
#include "tree_attention/tree_attention.h"

#include <cmath>

#include "common/scratch.h"
#include "tree_attention/tiles.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

constexpr int64_t kChunkRows = 64;        // query rows that one task takes, if it can
constexpr int64_t kSerialWork = 1 << 17;  // multiply-adds below which one thread is faster
constexpr float kInfinity = __builtin_huge_valf();

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
  int64_t dim, v_dim;  // in whole vectors
  int64_t splits;      // at most this many per row of the batch
  bool parallel_splits;
  int64_t part_floats;  // one partial result: out, maxima, denominators
  int num_threads;
  float* parts;        // [B, Hkv, chunks, splits, part_floats] when parallel_splits
  int32_t* remaining;  // [B, Hkv, chunks]: splits still to do
};

// The unnormalised result of some keys for the rows of a task.
struct Part {
  float* out;    // [rows, v_dim]
  float* max;    // [rows], in units of log 2
  float* denom;  // [rows]
};

// One (batch row, KV head, chunk of window slots).
struct Unit {
  int64_t b, kv_head, chunk;
  int64_t prefix, nodes;
  int64_t first_slot, live_slots, slots;  // live: below num_nodes
  int64_t key_begin, key_end;             // no row sees a key outside
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
  int64_t depth = p.window_slots;
  for (int64_t i = 0; p.window != 0 && i < u.live_slots; ++i)
    depth = min64(depth, depth_of(p, u.b, u.first_slot + i));
  u.key_begin = lowest_key(p, u.prefix, depth);
  u.key_end = p.tree_mask.data == nullptr ? u.prefix + u.first_slot + u.live_slots : total;
  if (p.split_size > 0) {
    u.split_begin = 0;
    u.split_size = ceil_div(p.split_size, kBlockKeys) * kBlockKeys;
  } else {
    u.split_begin = lowest_key(p, u.prefix, 0) / kBlockKeys * kBlockKeys;
    u.split_size =
        max64(1, ceil_div(ceil_div(total - u.split_begin, kBlockKeys), plan.splits)) * kBlockKeys;
  }
  u.splits = u.live_slots == 0 ? 1 : max64(1, ceil_div(total - u.split_begin, u.split_size));
  return u;
}

// Bit i is set when the row of window slot `slot` sees key block_begin + i.
uint64_t visible_keys(const TreeAttentionParams& p, const Unit& u, int64_t slot,
                      int64_t block_begin) {
  const int64_t from_prefix = u.prefix - block_begin;  // keys of this block in the prefix
  const int64_t depth = depth_of(p, u.b, slot);
  const int64_t lowest = p.window == 0 ? 0 : u.prefix + depth - p.window + 1;
  const uint64_t in_window = ~low_bits(lowest - block_begin);
  if (p.tree_mask.data == nullptr) return low_bits(from_prefix + slot + 1) & in_window;

  uint64_t bits = low_bits(from_prefix) & in_window;
  if (from_prefix >= kBlockKeys) return bits;
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

// ---- loading

template <class E>
SPECDEC_INLINE F32 load_columns(const E* row, int64_t column, int64_t n) {
  return column + kLanes <= n ? load(row + column)
                              : load_partial(row + column, int(n - column), 0.0f);
}

template <class E>
void widen(const E* row, int64_t n, float factor, float* target) {
  for (int64_t c = 0; c < n; c += kLanes) store(target + c, load_columns(row, c, n) * factor);
}

template <class E>
void load_queries(const TreeAttentionParams& p, const Plan& plan, const Unit& u, float* q) {
  const float factor = p.softcap > 0 ? p.scale / p.softcap : p.scale * kLog2E;
  for (int64_t slot = 0; slot < u.live_slots; ++slot)
    for (int64_t g = 0; g < plan.group; ++g, q += plan.dim)
      widen(&at<E>(p.q, u.b, u.first_slot + slot, u.kv_head * plan.group + g), p.dim, factor, q);
}

// Pointers to the rows of a view for keys [begin, end) of the cache.
template <class E>
void find_rows(const TreeAttentionParams& p, const Unit& u, const AttentionView& view,
               int64_t begin, int64_t end, const E** rows) {
  if (p.page_size == 0) {
    const E* row = &at<E>(view, u.b, u.kv_head, begin);
    for (int64_t i = 0; i < end - begin; ++i) rows[i] = row + i * view.stride[2];
    return;
  }
  for (int64_t key = begin; key < end;) {
    const int64_t block = key / p.page_size;
    const int64_t stop = min64(end, (block + 1) * p.page_size);
    const int64_t page = at<int32_t>(p.block_table, u.b, block);
    for (; key < stop; ++key)
      rows[key - begin] = &at<E>(view, page, u.kv_head, key - block * p.page_size);
  }
}

template <class E>
void find_keys(const TreeAttentionParams& p, const Unit& u, int64_t block_begin, int64_t begin,
               int64_t end, KeyBlock<E>* block) {
  block->first = int(begin - block_begin);
  block->count = int(end - block_begin);
  find_rows(p, u, p.k, begin, end, block->k + block->first);
  find_rows(p, u, p.v, begin, end, block->v + block->first);
  for (int i = 0; i < block->first; ++i) block->k[i] = block->k[block->first];
  for (int i = block->count; i < kBlockKeys; ++i) block->k[i] = block->k[block->first];
}

template <class E>
void widen_keys(const TreeAttentionParams& p, const Plan& plan, const KeyBlock<E>& block,
                float* target, KeyBlock<float>* wide) {
  // One vector more than a row: rows of 2^n bytes would fall into few sets of the cache.
  const int64_t stride = plan.dim + kLanes, v_stride = plan.v_dim + kLanes;
  float* v_target = target + kBlockKeys * stride;
  wide->first = block.first;
  wide->count = block.count;
  for (int i = 0; i < kBlockKeys; ++i) wide->k[i] = target + block.first * stride;
  for (int i = block.first; i < block.count; ++i) {
    wide->k[i] = target + i * stride;
    wide->v[i] = v_target + i * v_stride;
    widen(block.k[i], p.dim, 1.0f, target + i * stride);
    widen(block.v[i], p.v_dim, 1.0f, v_target + i * v_stride);
  }
}

// ---- softmax

SPECDEC_INLINE F32 mask_scores(F32 scores, uint64_t bits) {
  I32 lane_bit;
  for (int lane = 0; lane < kLanes; ++lane) lane_bit[lane] = 1 << lane;
  const I32 hidden = (broadcast_i32(int32_t(bits & low_bits(kLanes))) & lane_bit) == 0;
  return select(hidden, broadcast(-kInfinity), scores);
}

// Turns the scores of one row into weights and updates its maximum and denominator.
SPECDEC_INLINE void softmax_row(float* scores, int vectors, uint64_t visible, float softcap,
                                float* max, float* lanes, float* rescale) {
  F32 top = broadcast(-kInfinity);
  for (int i = 0; i < vectors; ++i) {
    F32 s = load(scores + i * kLanes);
    if (softcap > 0) s = tanh(s) * (softcap * kLog2E);
    if (visible != ~uint64_t(0)) s = mask_scores(s, visible >> (i * kLanes));
    store(scores + i * kLanes, s);
    top = vmax(s, top);
  }
  const float block_max = reduce_max(top);
  const float new_max = block_max > *max ? block_max : *max;
  const float base = new_max == -kInfinity ? 0.0f : new_max;
  const float factor = exp2_nonpositive(*max - base);
  F32 sum = {};
  for (int i = 0; i < vectors; ++i) {
    const F32 weight = exp2_nonpositive(load(scores + i * kLanes) - base);
    store(scores + i * kLanes, weight);
    sum = sum + weight;
  }
  store(lanes, load(lanes) * factor + sum);
  *max = new_max;
  *rescale = factor;
}

// ---- one split of one unit

struct Scratch {
  RowBlock rows;
  float* lanes;       // [rows, kLanes], denominators before the sum over lanes
  float* wide;        // a block of K and V in fp32
  uint64_t* visible;  // [chunk_slots]
  float* parts;       // two partial results
};

template <class E>
void attend_block(const TreeAttentionParams& p, const Plan& plan, const Unit& u, int64_t begin,
                  int64_t end, const Scratch& s, float* max) {
  const int64_t block_begin = begin / kBlockKeys * kBlockKeys;
  KeyBlock<E> block;
  find_keys(p, u, block_begin, begin, end, &block);
  const bool whole = p.dim == plan.dim && p.v_dim == plan.v_dim;
  const bool direct = whole && (std::is_same<E, float>::value || s.rows.rows <= kTileRows);
  KeyBlock<float> wide;
  if (direct) {
    score_block(s.rows, block);
  } else {
    widen_keys(p, plan, block, s.wide, &wide);
    score_block(s.rows, wide);
  }
  const int vectors = int(ceil_div(block.count, kLanes));
  for (int64_t slot = 0; slot < u.live_slots; ++slot) {
    const uint64_t visible = visible_keys(p, u, u.first_slot + slot, block_begin) &
                             low_bits(block.count) & ~low_bits(block.first);
    for (int64_t row = slot * plan.group; row < (slot + 1) * plan.group; ++row)
      softmax_row(s.rows.scores + row * kBlockKeys, vectors, visible, p.softcap, max + row,
                  s.lanes + row * kLanes, s.rows.rescale + row);
  }
  if (direct)
    value_block(s.rows, block);
  else
    value_block(s.rows, wide);
}

template <class E>
void attend_split(const TreeAttentionParams& p, const Plan& plan, const Unit& u, int64_t split,
                  Scratch s, const Part& part) {
  const int64_t rows = u.live_slots * plan.group;
  s.rows.rows = int(rows);
  s.rows.out = part.out;
  std::memset(part.out, 0, rows * plan.v_dim * sizeof(float));
  std::memset(s.lanes, 0, rows * kLanes * sizeof(float));
  for (int64_t row = 0; row < rows; ++row) part.max[row] = -kInfinity;
  const int64_t split_begin = u.split_begin + split * u.split_size;
  const int64_t end = min64(u.key_end, split_begin + u.split_size);
  for (int64_t begin = max64(u.key_begin, split_begin); begin < end;) {
    const int64_t next = min64(end, (begin / kBlockKeys + 1) * kBlockKeys);
    attend_block<E>(p, plan, u, begin, next, s, part.max);
    begin = next;
  }
  for (int64_t row = 0; row < rows; ++row)
    part.denom[row] = reduce_add(load(s.lanes + row * kLanes));
}

// ---- combining splits and writing results

SPECDEC_INLINE float merge_weight(float max, float base) {
  return exp2_nonpositive(max - (base == -kInfinity ? 0.0f : base));
}

void merge(const Plan& plan, int64_t rows, const Part& total, const Part& part) {
  for (int64_t row = 0; row < rows; ++row) {
    const float max = part.max[row] > total.max[row] ? part.max[row] : total.max[row];
    const F32 old = broadcast(merge_weight(total.max[row], max));
    const F32 fresh = broadcast(merge_weight(part.max[row], max));
    float* out = total.out + row * plan.v_dim;
    const float* added = part.out + row * plan.v_dim;
    for (int64_t c = 0; c < plan.v_dim; c += kLanes)
      store(out + c, fma(load(added + c), fresh, load(out + c) * old));
    total.denom[row] = total.denom[row] * old[0] + part.denom[row] * fresh[0];
    total.max[row] = max;
  }
}

template <class E>
void write_row(const TreeAttentionParams& p, int64_t b, int64_t slot, int64_t head,
               const float* source, float factor) {
  E* out = static_cast<E*>(p.out) + ((b * p.window_slots + slot) * p.q_heads + head) * p.v_dim;
  int64_t c = 0;
  for (; c + kLanes <= p.v_dim; c += kLanes) store(out + c, load(source + c) * factor);
  if (c < p.v_dim) store_partial(out + c, load(source + c) * factor, int(p.v_dim - c));
}

template <class E>
void write_results(const TreeAttentionParams& p, const Plan& plan, const Unit& u,
                   const Part& part) {
  for (int64_t i = 0; i < u.slots * plan.group; ++i) {
    const int64_t slot = u.first_slot + i / plan.group;
    const int64_t head = u.kv_head * plan.group + i % plan.group;
    float& lse = p.lse[(u.b * p.q_heads + head) * p.window_slots + slot];
    if (i >= u.live_slots * plan.group) {  // padding
      E* out =
          static_cast<E*>(p.out) + ((u.b * p.window_slots + slot) * p.q_heads + head) * p.v_dim;
      std::memset(out, 0, p.v_dim * sizeof(E));
      lse = -kInfinity;
      continue;
    }
    float max = part.max[i], denom = part.denom[i], factor = 1.0f;
    if (p.sinks.data != nullptr) {
      const float sink = at<float>(p.sinks, head) * kLog2E;
      const float top = sink > max ? sink : max;
      factor = merge_weight(max, top);
      denom = denom * factor + merge_weight(sink, top);
      max = top;
    }
    write_row<E>(p, u.b, slot, head, part.out + i * plan.v_dim, denom == 0 ? 0.0f : factor / denom);
    lse = max == -kInfinity && denom == 0 ? max : max * kLn2 + std::log(denom);
  }
}

// ---- tasks

Part part_at(const Plan& plan, float* memory) {
  const int64_t rows = plan.chunk_slots * plan.group;
  return {memory, memory + rows * plan.v_dim, memory + rows * plan.v_dim + rows};
}

bool make_scratch(const Plan& plan, Scratch* s) {
  const int64_t rows = plan.chunk_slots * plan.group;
  const int64_t wide = kBlockKeys * (plan.dim + plan.v_dim + 2 * kLanes);
  const int64_t row_floats = plan.dim + kBlockKeys + kLanes + kLanes;
  const int64_t floats = wide + rows * row_floats + 2 * plan.part_floats;
  float* memory = static_cast<float*>(thread_scratch(0, floats * sizeof(float)));
  if (memory == nullptr) return false;
  s->wide = memory;
  s->rows.q = s->wide + wide;
  s->rows.scores = s->rows.q + rows * plan.dim;
  s->lanes = s->rows.scores + rows * kBlockKeys;
  s->rows.rescale = s->lanes + rows * kLanes;
  s->parts = s->rows.rescale + rows * kLanes;
  s->rows.dim = plan.dim;
  s->rows.v_dim = plan.v_dim;
  return true;
}

template <class E>
void run_unit(const TreeAttentionParams& p, const Plan& plan, int64_t index, const Scratch& s) {
  const Unit u = make_unit(p, plan, index);
  const Part total = part_at(plan, s.parts);
  if (u.live_slots > 0) {
    load_queries<E>(p, plan, u, s.rows.q);
    attend_split<E>(p, plan, u, 0, s, total);
    for (int64_t split = 1; split < u.splits; ++split) {
      const Part part = part_at(plan, s.parts + plan.part_floats);
      attend_split<E>(p, plan, u, split, s, part);
      merge(plan, u.live_slots * plan.group, total, part);
    }
  }
  write_results<E>(p, plan, u, total);
}

// The last thread to finish a split of the unit merges them all, in order.
template <class E>
void run_split(const TreeAttentionParams& p, const Plan& plan, int64_t index, int64_t split,
               const Scratch& s) {
  const Unit u = make_unit(p, plan, index);
  if (split >= u.splits) return;
  float* parts = plan.parts + index * plan.splits * plan.part_floats;
  if (u.live_slots > 0) {
    load_queries<E>(p, plan, u, s.rows.q);
    attend_split<E>(p, plan, u, split, s, part_at(plan, parts + split * plan.part_floats));
  }
  const int32_t done = __atomic_add_fetch(&plan.remaining[index], 1, __ATOMIC_ACQ_REL);
  if (done < u.splits) return;
  const Part total = part_at(plan, parts);
  for (int64_t i = 1; i < u.splits; ++i)
    merge(plan, u.live_slots * plan.group, total, part_at(plan, parts + i * plan.part_floats));
  write_results<E>(p, plan, u, total);
}

int64_t gcd(int64_t a, int64_t b) { return b == 0 ? a : gcd(b, a % b); }

Plan make_plan(const TreeAttentionParams& p) {
  Plan plan = {};
  plan.group = p.q_heads / p.kv_heads;
  plan.dim = whole_vectors(p.dim);
  plan.v_dim = whole_vectors(p.v_dim);
  const int64_t most = max64(1, kChunkRows / plan.group);
  plan.chunks = ceil_div(p.window_slots, most);
  plan.chunk_slots = ceil_div(p.window_slots, plan.chunks);
  plan.chunks = ceil_div(p.window_slots, plan.chunk_slots);
  const int64_t rows = plan.chunk_slots * plan.group;
  plan.part_floats = whole_vectors(rows * (plan.v_dim + 2));

  int64_t longest = 0, work = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t nodes = at<int32_t>(p.num_nodes, b);
    const int64_t keys = nodes > 0 ? nodes + at<int32_t>(p.prefix_len, b) : 0;
    longest = max64(longest, keys);
    work += keys * nodes * p.q_heads * (p.dim + p.v_dim);
  }
  plan.num_threads = work < kSerialWork ? 1 : p.num_threads;
  const int64_t units = p.batch * p.kv_heads * plan.chunks;
  const bool uneven = units % plan.num_threads != 0 && units < 8 * plan.num_threads;
  if (p.split_size > 0) {
    plan.splits = max64(1, ceil_div(longest, ceil_div(p.split_size, kBlockKeys) * kBlockKeys));
  } else {
    plan.splits = uneven ? plan.num_threads / gcd(units, plan.num_threads) : 1;
    plan.splits = max64(1, min64(plan.splits, ceil_div(longest, kBlockKeys)));
  }
  plan.parallel_splits = uneven && plan.splits > 1;
  return plan;
}

template <class E>
Status run(const TreeAttentionParams& p) {
  Plan plan = make_plan(p);
  const int64_t units = p.batch * p.kv_heads * plan.chunks;
  int64_t tasks = units;
  if (plan.parallel_splits) {
    tasks = units * plan.splits;
    const int64_t floats = tasks * plan.part_floats;
    plan.parts = static_cast<float*>(thread_scratch(1, (floats + units) * sizeof(float)));
    if (plan.parts == nullptr) return Status::out_of_memory;
    plan.remaining = reinterpret_cast<int32_t*>(plan.parts + floats);
    std::memset(plan.remaining, 0, units * sizeof(int32_t));
  }
  bool failed = false;
#pragma omp parallel num_threads(plan.num_threads) if (plan.num_threads > 1)
  {
    Scratch s;
    const bool ready = make_scratch(plan, &s);
    if (!ready) failed = true;
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; ++task) {
      if (!ready) continue;
      if (plan.parallel_splits)
        run_split<E>(p, plan, task / plan.splits, task % plan.splits, s);
      else
        run_unit<E>(p, plan, task, s);
    }
  }
  return failed ? Status::out_of_memory : Status::ok;
}

}  // namespace

Status tree_attention(const TreeAttentionParams& p) {
  if (p.batch == 0 || p.window_slots == 0 || p.q_heads == 0) return Status::ok;
  switch (p.dtype) {
    case DType::f32:
      return run<float>(p);
    case DType::bf16:
      return run<BFloat16>(p);
    case DType::f16:
      return run<Half>(p);
    default:
      return Status::unsupported_dtype;
  }
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
