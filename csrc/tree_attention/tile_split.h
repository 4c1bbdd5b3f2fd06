// Blocks of keys for all query rows of a unit, with matrix tiles.
#pragma once

#include "tree_attention/softmax.h"
#include "tree_attention/tile_products.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

constexpr int kTallRows = 2 * kTileSide;  // query rows that are worked on together

// The parts of a block's work for query rows row..row+31.
struct TallRows {
  const TreeAttentionParams& p;
  const Plan& plan;
  const Unit& u;
  const Scratch& s;
  const Part& part;
  int row, rows;

  void weigh(const Range& range, int keys, Pace& pace) const {
    const auto words = [&](int i) {
      return range.open ? nullptr : s.visible + (row + i) / plan.group * kBlockWords;
    };
    for (int i = 0; i < rows; i += kLanes) {
      const RowState state = {part.max + row + i, part.denom + row + i, s.rescale + i};
      softmax_rows<Pairs>(
          s.scores + i * kBlockKeys, kBlockKeys, int(min64(rows - i, kLanes)), keys / kLanes,
          [&](int lane) { return words(i + lane); }, score_scale(p), state,
          [&] { pace.turn(kRowWork); });
    }
  }

  // values(column): a panel of 32 columns of V.
  template <class Values>
  SPECDEC_INLINE void add_values(int keys, const Values& values, Pace& pace) const {
    float* out = part.out + row * plan.v_dim;
    rescale_rows(s.rescale, rows, plan.v_dim, out);
    for (int64_t column = 0; column < plan.v_dim; column += kTwoTiles) {
      multiply<true>(rows, plan.v_dim - column, (const Item*)s.scores, kBlockKeys * sizeof(Item),
                     values(column), keys / 2, out + column, plan.v_dim, pace);
    }
  }
};

// The first 32 rows of q, [items, 32].
void pack_queries(const Plan& plan, int64_t rows, const Item* q, Item* target) {
  const Item* all[kTwoTiles];
  for (int i = 0; i < kTwoTiles; ++i) all[i] = q + (i < whole_vectors(rows) ? i : 0) * plan.items;
  pack_rows(all, plan.items, target);
}

// What a block's requests for the next are spread over.
int64_t tile_work(const Plan& plan, int64_t rows) {
  const int64_t steps = kBlockKeys / kTwoTiles * (plan.items / kTileSide) +
                        kBlockKeys / kTwoTiles * ceil_div(plan.v_dim, kTwoTiles);
  const int64_t softmax = rows * kRowWork;
  if (rows > kTallRows) return ceil_div(rows, kTallRows) * steps * kStepWork + softmax;
  return steps * kStepWork + kBlockKeys / 2 * ceil_div(plan.v_dim, kTwoTiles) * kPairWork +
         kBlockKeys / kLanes * ceil_div(rows, kLanes) * kTransposeWork + softmax;
}

SPECDEC_INLINE int whole_tiles(int keys) { return (keys + kTwoTiles - 1) / kTwoTiles * kTwoTiles; }

// Up to 32 query rows: K is tile A, straight from the cache, and the scores are transposed; V is
// packed for one product.
template <class E>
void attend_few_in_tiles(const TallRows& t, const Range& range, const KeyBlock<E>& block,
                         Ahead& ahead) {
  const Plan& plan = t.plan;
  const int keys = whole_tiles(range.count);
  const ItemRows k = key_rows<Pairs>(t.p, plan, block, t.s.key_copies);
  Pace pace(ahead, 1);
  float* columns = t.s.score_columns;
  for (int key = 0; key < range.count; key += kTwoTiles)
    multiply<false>(int(min64(range.count - key, kTwoTiles)), t.rows, k.row(key), k.stride,
                    Packed{t.s.q_panels}, plan.items, columns + key * kTwoTiles, kTwoTiles, pace);
  for (int key = 0; key < keys; key += kLanes)
    for (int row = 0; row < t.rows; row += kLanes) {
      const Item* rows[kLanes];
      for (int i = 0; i < kLanes; ++i) rows[i] = (const Item*)columns + (key + i) * kTwoTiles + row;
      U32 square[kLanes];
      pace.turn(kTransposeWork);
      load_transposed(rows, 0, square);
      for (int i = 0; i < kLanes; ++i)
        store_items((Item*)t.s.scores + (row + i) * kBlockKeys + key, square[i]);
    }
  t.weigh(range, keys, pace);
  // Packed while the step before is multiplied, twice in the same place.
  const auto values = [&](int64_t column) {
    return [&, column](int64_t pair) {
      Item* target = t.s.values + pair / kTileSide % 2 * (kTileSide * kTwoTiles);
      pack_values(block, column, t.p.v_dim, int(pair), kTileSide, pace, target);
      return target;
    };
  };
  t.add_values(keys, values, pace);
}

// More query rows: the block is packed once, then each 32 of them go through it.
template <class E>
void attend_many_in_tiles(TallRows t, const Range& range, const KeyBlock<E>& block, Ahead& ahead) {
  const Plan& plan = t.plan;
  const int keys = whole_tiles(range.count);
  const Item* k[kBlockKeys];
  find_key_items<Pairs>(t.p, plan, block, t.s.key_copies, k);
  Ahead none = {};
  Pace pace(ahead, 1), idle(none, 0);
  const auto values = [&](int64_t column) { return t.s.values + column * (keys / 2); };
  const auto panel = [&](int64_t column) { return Packed{values(column)}; };
  for (int key = 0; key < keys; key += kTwoTiles)
    pack_rows(k + key, plan.items, t.s.keys + key * plan.items);
  for (int64_t column = 0; column < plan.v_dim; column += kTwoTiles)
    pack_values(block, column, t.p.v_dim, 0, keys / 2, idle, values(column));
  const int64_t rows = t.u.live_slots * plan.group;
  for (t.row = 0; t.row < rows; t.row += kTallRows) {
    t.rows = int(min64(rows - t.row, kTallRows));
    for (int key = 0; key < keys; key += kTwoTiles)
      multiply<false>(t.rows, kTwoTiles, t.s.queries + t.row * plan.items,
                      plan.items * sizeof(Item), Packed{t.s.keys + key * plan.items}, plan.items,
                      t.s.scores + key, kBlockKeys, pace);
    t.weigh(range, keys, pace);
    t.add_values(keys, panel, pace);
  }
}

template <class E>
void attend_tiles(const TreeAttentionParams& p, const Plan& plan, const Unit& u, const Range& range,
                  const KeyBlock<E>& block, Ahead& ahead, const Scratch& s, const Part& part) {
  const int64_t rows = u.live_slots * plan.group;
  const TallRows t = {p, plan, u, s, part, 0, int(min64(rows, kTallRows))};
  if (rows > kTallRows)
    attend_many_in_tiles(t, range, block, ahead);
  else
    attend_few_in_tiles(t, range, block, ahead);
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
