// Products with matrix tiles. Queries and weights are tile A as they lie, in rows; keys in columns
// and pairs of V rows are tile B, in panels of two tiles. So scores and output are rows as well.
#pragma once

#include "common/amx.h"
#include "tree_attention/keys.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

constexpr int kTwoTiles = 2 * kTileSide;

// Nanoseconds, about: a step of four tile products, a pair of V rows packed, a square transposed, a
// row's softmax.
constexpr int64_t kStepWork = 20, kPairWork = 2, kTransposeWork = 25, kRowWork = 25;

// ---- tile B

// 32 rows of items become the columns of target, [items, 32].
SPECDEC_INLINE void pack_rows(const Item* const* rows, int64_t items, Item* target) {
  for (int64_t c = 0; c < items; c += kLanes)
    for (int half = 0; half < kTwoTiles; half += kLanes) {
      U32 square[kLanes];
      load_transposed(rows + half, c, square);
      for (int i = 0; i < kLanes; ++i) store_items(target + (c + i) * kTwoTiles + half, square[i]);
    }
}

// The first 32 of count values, with zeros behind them.
SPECDEC_INLINE U32 load_halves(const BFloat16* source, int64_t count) {
  if (count >= kTwoTiles) return load_items((const Item*)source);
  BFloat16 padded[kTwoTiles] = {};
  std::memcpy(padded, source, count * sizeof(BFloat16));
  return load_items((const Item*)padded);
}

// Columns column..column+31 of `pairs` pairs of V rows, from pair `first` on, [pairs, 32]; keys
// outside the block are zeros.
SPECDEC_INLINE void pack_values(const KeyBlock<BFloat16>& block, int64_t column, int64_t v_dim,
                                int first, int pairs, Pace& pace, Item* target) {
  const auto row = [&](int key) {
    return key >= block.first && key < block.count
               ? load_halves(block.v[key] + column, v_dim - column)
               : U32{};
  };
  for (int pair = first; pair < first + pairs; ++pair, target += kTwoTiles) {
    U32 low, high;
    interleave_halves(row(2 * pair), row(2 * pair + 1), &low, &high);
    pace.turn(kPairWork);
    store_items(target, low);
    store_items(target + kLanes, high);
  }
}

// ---- products

// kRowTiles x kColumnTiles tiles of c = a b, or c += a b, over the items of a, whose rows lie
// a_bytes apart; panel(s) is where rows s..s+15 of b are.
template <bool add, int kRowTiles, int kColumnTiles, class Panel>
SPECDEC_INLINE void multiply_tiles(const Item* a, int64_t a_bytes, const Panel& panel,
                                   int64_t items, float* c, int64_t c_stride, Pace& pace) {
  constexpr int64_t b_bytes = kTwoTiles * sizeof(Item);
  const int64_t c_bytes = c_stride * sizeof(float);
  float* lower = c + kTileSide * c_stride;
  if (add) {
    tile_load<0>(c, c_bytes);
    if (kColumnTiles == 2) tile_load<1>(c + kTileSide, c_bytes);
    if (kRowTiles == 2) tile_load<2>(lower, c_bytes);
    if (kRowTiles == 2 && kColumnTiles == 2) tile_load<3>(lower + kTileSide, c_bytes);
  } else {
    tile_zero<0>();
    if (kColumnTiles == 2) tile_zero<1>();
    if (kRowTiles == 2) tile_zero<2>();
    if (kRowTiles == 2 && kColumnTiles == 2) tile_zero<3>();
  }
  for (int64_t s = 0; s < items; s += kTileSide) {
    pace.turn(kStepWork);
    const Item* b = panel(s);
    tile_load<4>(a + s, a_bytes);
    tile_load<6>(b, b_bytes);
    tile_dot<0, 4, 6>();
    if (kColumnTiles == 2) tile_load<7>(b + kTileSide, b_bytes);
    if (kColumnTiles == 2) tile_dot<1, 4, 7>();
    if (kRowTiles == 2) tile_load<5>((const char*)(a + s) + kTileSide * a_bytes, a_bytes);
    if (kRowTiles == 2) tile_dot<2, 5, 6>();
    if (kRowTiles == 2 && kColumnTiles == 2) tile_dot<3, 5, 7>();
  }
  tile_store<0>(c, c_bytes);
  if (kColumnTiles == 2) tile_store<1>(c + kTileSide, c_bytes);
  if (kRowTiles == 2) tile_store<2>(lower, c_bytes);
  if (kRowTiles == 2 && kColumnTiles == 2) tile_store<3>(lower + kTileSide, c_bytes);
}

// At most 32 rows and columns.
template <bool add, class Panel>
void multiply(int rows, int64_t columns, const Item* a, int64_t a_bytes, const Panel& panel,
              int64_t items, float* c, int64_t c_stride, Pace& pace) {
  const bool tall = rows > kTileSide, wide = columns > kTileSide;
  if (tall && wide) multiply_tiles<add, 2, 2>(a, a_bytes, panel, items, c, c_stride, pace);
  if (tall && !wide) multiply_tiles<add, 2, 1>(a, a_bytes, panel, items, c, c_stride, pace);
  if (!tall && wide) multiply_tiles<add, 1, 2>(a, a_bytes, panel, items, c, c_stride, pace);
  if (!tall && !wide) multiply_tiles<add, 1, 1>(a, a_bytes, panel, items, c, c_stride, pace);
}

// A panel that is in memory.
struct Packed {
  const Item* data;
  const Item* operator()(int64_t row) const { return data + row * kTwoTiles; }
};

// Tiles can't be scaled: the old output is, but only where a maximum has grown.
SPECDEC_INLINE void rescale_rows(const float* rescale, int rows, int64_t v_dim, float* out) {
  for (int row = 0; row < rows; ++row, out += v_dim) {
    if (rescale[row] == 1.0f) continue;
    for (int64_t c = 0; c < v_dim; c += kLanes) store(out + c, load(out + c) * rescale[row]);
  }
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
