// All keys of one split for the query rows of one unit, block by block.
#pragma once

#include "tree_attention/products.h"
#include "tree_attention/tile_split.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

template <class M>
constexpr bool kUsesTiles = kHasTiles && M::kElements == 2;
// Whether query rows are lanes, or too few for that. The choice shows in no bit.
constexpr int kFewRows = kLanes < 8 ? kTileRows : 2 * kTileRows;
template <class M>
bool uses_panels(int64_t rows) {
  return rows > kFewRows && !kUsesTiles<M>;
}
// Weights are made for whole groups of keys; tiles take 16 pairs at a time.
template <class M>
constexpr int kGroupKeys = kUsesTiles<M> ? kTwoTiles : kLanes;

// ---- queries

template <class E, class M>
void load_queries(const TreeAttentionParams& p, const Plan& plan, const Unit& u, Item* q) {
  for (int64_t slot = 0; slot < u.live_slots; ++slot)
    for (int64_t g = 0; g < plan.group; ++g, q += plan.items)
      copy_row(M(), &at<E>(p.q, u.b, u.first_slot + slot, u.kv_head * plan.group + g), p.dim, q);
}

// Calls body(first row, vectors) for panels of nearly even size.
template <class Body>
SPECDEC_INLINE void for_each_panel(int64_t rows, const Body& body) {
  const int vectors = int(ceil_div(rows, kLanes));
  const int panels = (vectors + kPanelVectors - 1) / kPanelVectors;
  for (int panel = 0, done = 0; panel < panels; ++panel) {
    const int size = (vectors - done + panels - panel - 1) / (panels - panel);
    body(done * kLanes, size);
    done += size;
  }
}

// Rows of items become the columns of panels; missing rows are zeros.
void make_panels(const Plan& plan, int64_t rows, const Item* q, Item* panels) {
  for_each_panel(rows, [&](int64_t row, int vectors) {
    Item* target = panels + row * plan.items;
    for (int v = 0; v < vectors; ++v, row += kLanes)
      for (int64_t c = 0; c < plan.items; c += kLanes) {
        U32 square[kLanes];
        for (int i = 0; i < kLanes; ++i)
          square[i] = row + i < rows ? load_items(q + (row + i) * plan.items + c) : U32{};
        transpose(square);
        for (int i = 0; i < kLanes; ++i)
          store_items(target + (c + i) * vectors * kLanes + v * kLanes, square[i]);
      }
  });
}

// The transposed result of panels as rows.
void read_panels(const Plan& plan, int64_t rows, const float* panels, float* out) {
  for_each_panel(rows, [&](int64_t row, int vectors) {
    const Item* source = (const Item*)(panels + row * plan.v_dim);
    for (int v = 0; v < vectors; ++v, row += kLanes)
      for (int64_t c = 0; c < plan.v_dim; c += kLanes) {
        U32 square[kLanes];
        for (int i = 0; i < kLanes; ++i)
          square[i] = load_items(source + (c + i) * vectors * kLanes + v * kLanes);
        transpose(square);
        for (int i = 0; i < kLanes; ++i)
          store(out + (row + i) * plan.v_dim + c, bit_cast<F32>(square[i]));
      }
  });
}

void spread_words(const Plan& plan, const Unit& u, const uint64_t* visible, int32_t* words) {
  for (int half = 0; half < 2 * kBlockWords; ++half) {
    int32_t* word = words + half * plan.rows;
    for (int64_t slot = 0; slot < u.live_slots; ++slot)
      for (int64_t g = 0; g < plan.group; ++g)
        *word++ = int32_t(visible[slot * kBlockWords + half / 2] >> (half % 2 * 32));
    for (; word < words + (half + 1) * plan.rows; ++word) *word = 0;
  }
}

// ---- blocks

// The work of a block, in the units of Pace.
template <class M>
int64_t block_work(const Plan& plan, int64_t rows, bool panels) {
  if (kUsesTiles<M>) return tile_work(plan, rows);
  const int64_t steps = kBlockKeys / M::kElements;
  const int64_t columns = plan.items * kBlockKeys + plan.v_dim * steps;
  if (panels) return ceil_div(rows, kLanes) * columns / 2;
  const int64_t squares = plan.items * kBlockKeys / kLanes / kLanes;
  const int64_t interleaved = M::kElements == 2 ? plan.v_dim / kLanes * steps : 0;
  return rows * columns / kLanes / 2 + squares * kSquareWork + interleaved * kInterleaveWork +
         rows * kSoftmaxWork;
}

template <class E, class M>
void attend_few(const TreeAttentionParams& p, const Plan& plan, const Unit& u, const Range& range,
                const KeyBlock<E>& block, Ahead& ahead, const Scratch& s, const Part& part) {
  const int rows = int(u.live_slots * plan.group);
  const FewRows few = {s.queries, plan.items, s.scores, part.out, plan.v_dim, s.rescale};
  const Item* k[kBlockKeys];
  find_key_items<M>(p, plan, block, s.key_copies, k);
  for (int key = block.first / kWordKeys * kWordKeys; key < block.count; key += kWordKeys) {
    transpose_keys(k + key, plan.items, ahead, s.keys);
    for_each_tile(rows, [&](int row, auto size) {
      few_scores<M, decltype(size)::value>(few, row, s.keys, key, ahead);
    });
  }
  Pace pace(ahead, kSoftmaxWork);
  for (int row = 0; row < rows; ++row) {
    pace.turn();
    softmax_row<M>(s.scores + row * kBlockKeys, int(ceil_div(block.count, kLanes)),
                   range.open ? nullptr : s.visible + row / plan.group * kBlockWords,
                   score_scale(p), {part.max + row, part.denom + row, s.rescale + row});
  }
  const int begin = block.first / M::kElements;
  const int end = (block.count + M::kElements - 1) / M::kElements;
  const auto multiply = [&](const auto& values) {
    for_each_tile(rows, [&](int row, auto size) {
      few_values<M, decltype(size)::value>(few, row, values, begin, end, ahead);
    });
  };
  // Few rows are done with a pair of V rows before storing it interleaved would pay.
  if constexpr (M::kElements == 2) {
    if (rows <= kTileRows && p.v_dim % (2 * kLanes) == 0 && block.first % 2 == 0 &&
        block.count % 2 == 0)
      return multiply(PairsOfRows{(const Item* const*)block.v});
  }
  multiply(value_rows(M(), p, plan, block, s.values));
}

template <class M, int kVectors>
void attend_panel(const Plan& plan, const Range& range, int64_t row, int64_t items,
                  const ItemRows& k, const ItemRows& v, ScoreScale scale, Ahead& ahead,
                  const Scratch& s, const Part& part) {
  constexpr int64_t kRows = kVectors * kLanes;
  const Item* q = s.q_panels + row * plan.items;
  float* out = s.out_panels + row * plan.v_dim;
  score_panel<M, kVectors>(q, items, k, range.first, range.count, ahead, s.scores);
  const int keys = int(whole_vectors(range.count));
  for (int64_t i = 0; i < kRows; i += kLanes)
    softmax_columns<M>(s.scores + i, kRows, keys, range.open ? nullptr : s.words + row + i,
                       plan.rows, scale,
                       {part.max + row + i, part.denom + row + i, s.rescale + row + i});
  const int begin = range.first / M::kElements;
  const int end = (range.count + M::kElements - 1) / M::kElements;
  value_panel<M, kVectors>((const Item*)s.scores, v, begin, end, plan.v_dim, s.rescale + row, ahead,
                           out);
}

template <class E, class M>
void attend_many(const TreeAttentionParams& p, const Plan& plan, const Unit& u, const Range& range,
                 const KeyBlock<E>& block, Ahead& ahead, const Scratch& s, const Part& part) {
  if (!range.open) spread_words(plan, u, s.visible, s.words);
  const ItemRows k = key_rows<M>(p, plan, block, s.key_copies);
  const ItemRows v = value_rows(M(), p, plan, block, s.values);
  const int64_t items = ceil_div(p.dim, M::kElements);
  const ScoreScale scale = score_scale(p);
  for_each_panel(u.live_slots * plan.group, [&](int64_t row, int vectors) {
    if (vectors == 1) attend_panel<M, 1>(plan, range, row, items, k, v, scale, ahead, s, part);
    if (vectors == 2) attend_panel<M, 2>(plan, range, row, items, k, v, scale, ahead, s, part);
    if (vectors == 3) attend_panel<M, 3>(plan, range, row, items, k, v, scale, ahead, s, part);
#if defined(SPECDEC_ISA_avx512)
    if (vectors == 4) attend_panel<M, 4>(plan, range, row, items, k, v, scale, ahead, s, part);
#endif
  });
}

// The first block of a split; false without one.
template <class E>
bool find_first(const TreeAttentionParams& p, const Unit& u, int64_t split, KeyBlock<E>* block) {
  const int64_t split_begin = u.split_begin + split * u.split_size;
  const int64_t begin = max64(u.key_begin, split_begin);
  const int64_t end = min64(u.key_end, split_begin + u.split_size);
  if (u.live_slots == 0 || begin >= end) return false;
  find_keys(p, u, block_of(begin, end, split_begin), block);
  return true;
}

// following: the unit that this thread takes next, if it is to be asked for, or nullptr.
template <class E, class M>
void attend_split(const TreeAttentionParams& p, const Plan& plan, const Unit& u, int64_t split,
                  const Unit* following, const Scratch& s, const Part& part) {
  const int64_t rows = u.live_slots * plan.group, lanes = whole_vectors(rows);
  const bool panels = uses_panels<M>(rows);
  std::memset(panels ? s.out_panels : part.out, 0, lanes * plan.v_dim * sizeof(float));
  std::memset(part.denom, 0, lanes * sizeof(float));
  for (int64_t row = 0; row < lanes; ++row) part.max[row] = -kInfinity;
  const int64_t split_begin = u.split_begin + split * u.split_size;
  const int64_t end = min64(u.key_end, split_begin + u.split_size);
  int64_t begin = max64(u.key_begin, split_begin);
  const int64_t work = block_work<M>(plan, rows, panels);
  KeyBlock<E> blocks[2];
  find_first(p, u, split, &blocks[0]);
  for (int turn = 0; begin < end; turn ^= 1) {
    const KeyBlock<E>& block = blocks[turn];
    KeyBlock<E>& next = blocks[turn ^ 1];
    Range range = block_of(begin, end, split_begin);
    begin = range.begin + range.count;
    Ahead ahead = {};
    if (begin < end) {
      find_keys(p, u, block_of(begin, end, split_begin), &next);
      ahead = ahead_of(p, next, work);
    } else if (following != nullptr && find_first(p, *following, 0, &next)) {
      ahead = ahead_of(p, next, work);
    }
    range.open = range.first == 0 && range.count % kGroupKeys<M> == 0 && begin <= u.prefix &&
                 range.begin >= u.open_begin;
    if (!range.open) find_visible(p, u, range, s.visible);
    if constexpr (kUsesTiles<M>)
      attend_tiles(p, plan, u, range, block, ahead, s, part);
    else if (panels)
      attend_many<E, M>(p, plan, u, range, block, ahead, s, part);
    else
      attend_few<E, M>(p, plan, u, range, block, ahead, s, part);
  }
  if (panels) read_panels(plan, rows, s.out_panels, part.out);
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
