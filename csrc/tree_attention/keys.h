// A block of keys as the products want it: rows of items at a fixed distance, or transposed.
#pragma once

#include "common/amx.h"
#include "tree_attention/plan.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// Keys first..count-1 of the block that begins at slot `begin` of the cache.
struct Range {
  int64_t begin;
  int first, count;
  bool open;  // every row sees all of the block's keys, and they are whole groups
};

// The block of key `key` on the grid of its split, up to `end`.
Range block_of(int64_t key, int64_t end, int64_t split_begin) {
  const int64_t begin = key - (key - split_begin) % kBlockKeys;
  return {begin, int(key - begin), int(min64(end - begin, kBlockKeys)), false};
}

// One pointer per K and V row of a block, v right behind k. Entries outside first..count-1 repeat a
// valid row: their scores are computed and then masked, V is not read there.
template <class E>
struct KeyBlock {
  const E* k[kBlockKeys];
  const E* v[kBlockKeys];
  int first;
  int count;
  bool even;  // rows lie at the strides of the cache
};

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
void find_keys(const TreeAttentionParams& p, const Unit& u, const Range& range,
               KeyBlock<E>* block) {
  const int64_t begin = range.begin + range.first, end = range.begin + range.count;
  block->first = range.first;
  block->count = range.count;
  block->even = p.page_size == 0 || begin / p.page_size == (end - 1) / p.page_size;
  find_rows(p, u, p.k, begin, end, block->k + block->first);
  find_rows(p, u, p.v, begin, end, block->v + block->first);
  for (int i = 0; i < block->first; ++i) block->k[i] = block->k[block->first];
  for (int i = block->count; i < kBlockKeys; ++i) block->k[i] = block->k[block->first];
  for (int i = 0; i < block->first; ++i) block->v[i] = block->v[block->first];
  for (int i = block->count; i < kBlockKeys; ++i) block->v[i] = block->v[block->first];
}

// visible: [slots, kBlockWords]
void find_visible(const TreeAttentionParams& p, const Unit& u, const Range& range,
                  uint64_t* visible) {
  for (int64_t slot = 0; slot < u.live_slots; ++slot)
    for (int word = 0; word < kBlockWords; ++word) {
      const int64_t begin = word * kWordKeys;
      visible[slot * kBlockWords + word] =
          visible_keys(p, u, u.first_slot + slot, range.begin + begin) &
          low_bits(range.count - begin) & ~low_bits(range.first - begin);
    }
}

// ---- the next block

// CPUs with tiles have far memory: many lines must be on their way, from several pages. All lines
// go to the second cache, which can wait for more of them than the first and has room for a block.
constexpr int kStreams = kHasTiles ? 4 : 1;

// Asks for the K and V rows of the next block, evenly while this one is worked on: a burst of
// requests would hold up the loads behind it.
struct Ahead {
  const char* const* rows;  // 2 * kBlockKeys, or nullptr
  int next;
  int64_t k_bytes, v_bytes;  // of a row
  const char* at;
  const char* row_end;
  int64_t rate;  // lines per unit of work, in 2^-16
  int64_t due;   // the same

  void line() {
    if (at >= row_end) {
      constexpr int kRows = 2 * kBlockKeys;
      if (next == kRows) return;
      const int row = next % kStreams * (kRows / kStreams) + next / kStreams;
      at = rows[row];
      row_end = at + (row < kBlockKeys ? k_bytes : v_bytes);
      ++next;
    }
    __builtin_prefetch(at, 0, 2);
    at += 64;
  }
};

// Cycles, about two vector products each, that the parts of a block take beside their products.
constexpr int64_t kSquareWork = 15 * kLanes / 4;  // a square of keys transposed
constexpr int64_t kInterleaveWork = 1;            // a vector of V interleaved
constexpr int64_t kSoftmaxWork = 150;             // a block of weights, of one row

// Paces an Ahead through one loop; what each turn needs stays in registers. Units are two vector
// products or, with tiles, nanoseconds.
struct Pace {
  Ahead& ahead;
  const int64_t rate;
  int64_t due;
  SPECDEC_INLINE Pace(Ahead& next, int64_t units)  // of work per turn
      : ahead(next), rate(next.rate * units), due(next.due) {}
  SPECDEC_INLINE ~Pace() { ahead.due = due; }
  SPECDEC_INLINE void turn(int64_t times = 1) {
    for (due += times * rate; due >= 1 << 16; due -= 1 << 16) ahead.line();
  }
};

template <class E>
Ahead ahead_of(const TreeAttentionParams& p, const KeyBlock<E>& next, int64_t work) {
  const int64_t k_bytes = p.dim * int64_t(sizeof(E)), v_bytes = p.v_dim * int64_t(sizeof(E));
  const int64_t lines = kBlockKeys * (k_bytes + v_bytes) / 64;
  return {(const char* const*)next.k, 0, k_bytes, v_bytes, nullptr, nullptr,
          (lines << 16) / work,       0};
}

// ---- copies

template <class E>
SPECDEC_INLINE void copy_row(Floats, const E* row, int64_t n, Item* target) {
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) store_items(target + c, bit_cast<U32>(load(row + c)));
  if (c < n) store_items(target + c, bit_cast<U32>(load_partial(row + c, int(n - c), 0.0f)));
}

SPECDEC_INLINE void copy_row(Pairs, const BFloat16* row, int64_t n, Item* target) {
  int64_t c = 0;
  for (; c + 2 * kLanes <= n; c += 2 * kLanes)
    store_items(target + c / 2, load_items((const Item*)(row + c)));
  if (c == n) return;
  store_items(target + c / 2, U32{});
  std::memcpy(target + c / 2, row + c, (n - c) * sizeof(BFloat16));
}

// One vector more than a row: rows of 2^n bytes would fall into few sets of the cache.
SPECDEC_INLINE int64_t spread(int64_t items) { return items + kLanes; }

// Copies of rows first..count-1, with zeros up to a multiple of kTileKeys rows.
constexpr int kTileKeys = 16;
template <class M, class E>
ItemRows copy_rows(const E* const* rows, int first, int count, int64_t n, int64_t items,
                   Item* target) {
  const int64_t stride = spread(items);
  const int begin = first / kTileKeys * kTileKeys;
  const int end = (count + kTileKeys - 1) / kTileKeys * kTileKeys;
  for (int i = begin; i < end; ++i) {
    if (i >= first && i < count)
      copy_row(M(), rows[i], n, target + i * stride);
    else
      std::memset(target + i * stride, 0, items * sizeof(Item));
  }
  return {(const char*)target, stride * int64_t(sizeof(Item)), 0};
}

// K rows, straight from the cache where the product may read whole tiles of them there.
template <class M, class E>
ItemRows key_rows(const TreeAttentionParams& p, const Plan& plan, const KeyBlock<E>& block,
                  Item* copies) {
  const int elements = kHasTiles && M::kElements == 2 ? kTileDepth : M::kElements;
  if (std::is_same<E, typename M::Element>::value && block.even && block.first == 0 &&
      block.count % kTileKeys == 0 && p.dim % elements == 0)
    return {(const char*)block.k[0], p.k.stride[2] * int64_t(sizeof(E)), 0};
  return copy_rows<M>(block.k, block.first, block.count, p.dim, plan.items, copies);
}

// ---- values: row s holds the keys s * kElements and following

template <class E>
ItemRows value_rows(Floats, const TreeAttentionParams& p, const Plan& plan,
                    const KeyBlock<E>& block, Item* copies) {
  if (std::is_same<E, float>::value && block.even && p.v_dim == plan.v_dim)
    return {(const char*)block.v[block.first], p.v.stride[2] * int64_t(sizeof(E)), block.first};
  return copy_rows<Floats>(block.v, block.first, block.count, p.v_dim, plan.v_dim, copies);
}

SPECDEC_INLINE void interleave_rows(const BFloat16* a, const BFloat16* b, int64_t n, Item* target) {
  int64_t c = 0;
  for (; c + 2 * kLanes <= n; c += 2 * kLanes) {
    U32 low, high;
    interleave_halves(load_items((const Item*)(a + c)), load_items((const Item*)(b + c)), &low,
                      &high);
    store_items(target + c, low);
    store_items(target + c + kLanes, high);
  }
  for (; c < n; ++c) target[c] = uint32_t(a[c].bits) | uint32_t(b[c].bits) << 16;
  for (; c % kLanes != 0; ++c) target[c] = 0;
}

template <class E>
ItemRows value_rows(Pairs, const TreeAttentionParams& p, const Plan& plan, const KeyBlock<E>& block,
                    Item* copies) {
  const int64_t stride = spread(plan.v_dim);
  for (int s = block.first / 2; 2 * s < block.count; ++s) {
    Item* target = copies + s * stride;
    if (2 * s >= block.first && 2 * s + 1 < block.count) {
      interleave_rows(block.v[2 * s], block.v[2 * s + 1], p.v_dim, target);
      continue;
    }
    const bool is_second = 2 * s < block.first;  // the only key of its pair
    const BFloat16* row = block.v[2 * s + is_second];
    for (int64_t c = 0; c < plan.v_dim; ++c)
      target[c] = c < p.v_dim ? uint32_t(row[c].bits) << (is_second ? 16 : 0) : 0;
  }
  return {(const char*)copies, stride * int64_t(sizeof(Item)), 0};
}

// ---- keys in columns

// The K rows of a block as whole vectors of items; those outside repeat a row of it.
template <class M, class E>
void find_key_items(const TreeAttentionParams& p, const Plan& plan, const KeyBlock<E>& block,
                    Item* copies, const Item** rows) {
  if (std::is_same<E, typename M::Element>::value && p.dim == plan.items * M::kElements) {
    for (int i = 0; i < kBlockKeys; ++i) rows[i] = (const Item*)block.k[i];
    return;
  }
  const ItemRows all = copy_rows<M>(block.k, block.first, block.count, p.dim, plan.items, copies);
  for (int i = 0; i < kBlockKeys; ++i)
    rows[i] = all.row(min64(max64(i, block.first), block.count - 1));
}

// kWordKeys rows of items become the columns of target, [items, kWordKeys].
SPECDEC_INLINE void transpose_keys(const Item* const* rows, int64_t items, Ahead& ahead,
                                   Item* target) {
  Pace pace(ahead, kSquareWork);
  for (int key = 0; key < kWordKeys; key += kLanes) {
    for (int64_t c = 0; c < items; c += kLanes) {
      U32 square[kLanes];
      load_transposed(rows + key, c, square);
      pace.turn();
      for (int i = 0; i < kLanes; ++i) store_items(target + (c + i) * kWordKeys + key, square[i]);
    }
  }
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
