// The products of many query rows with matrix tiles: the layouts of products.h, but V is transposed
// once per block, because both products have the rows of K or V^T as tile A.
#pragma once

#include "common/amx.h"
#include "tree_attention/products.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// Scores of kKeyTiles x kRowTiles tiles; q and scores have `rows` columns.
template <int kKeyTiles, int kRowTiles>
SPECDEC_INLINE void score_tiles(const Item* q, int64_t rows, int64_t items, const char* k,
                                int64_t stride, float* scores) {
  const int64_t bytes = rows * int64_t(sizeof(Item));
  tile_zero<0>();
  if (kRowTiles == 2) tile_zero<1>();
  if (kKeyTiles == 2) tile_zero<2>();
  if (kKeyTiles == 2 && kRowTiles == 2) tile_zero<3>();
  for (int64_t s = 0; s < items; s += kTileSide, k += kTileBytes, q += kTileSide * rows) {
    tile_load<4>(k, stride);
    tile_load<6>(q, bytes);
    tile_dot<0, 4, 6>();
    if (kRowTiles == 2) tile_load<7>(q + kTileSide, bytes);
    if (kRowTiles == 2) tile_dot<1, 4, 7>();
    if (kKeyTiles == 2) tile_load<5>(k + kTileSide * stride, stride);
    if (kKeyTiles == 2) tile_dot<2, 5, 6>();
    if (kKeyTiles == 2 && kRowTiles == 2) tile_dot<3, 5, 7>();
  }
  tile_store<0>(scores, bytes);
  if (kRowTiles == 2) tile_store<1>(scores + kTileSide, bytes);
  if (kKeyTiles == 2) tile_store<2>(scores + kTileSide * rows, bytes);
  if (kKeyTiles == 2 && kRowTiles == 2) tile_store<3>(scores + kTileSide * rows + kTileSide, bytes);
}

template <int kVectors>
void score_panel_in_tiles(const Item* q, int64_t items, const ItemRows& k, int first, int count,
                          Ahead& ahead, float* scores) {
  constexpr int64_t kRows = kVectors * kTileSide;
  for (int key = first / kTileSide * kTileSide; key < count;) {
    const bool two = key + kTileSide < count;
    const char* keys = (const char*)k.row(key);
    float* target = scores + key * kRows;
    Pace(ahead, (two ? 2 : 1) * items * kTileSide * kVectors / 2).turn();
    for (int row = 0; row < kRows; row += 2 * kTileSide) {
      const bool wide = row + kTileSide < kRows;
      if (two && wide) score_tiles<2, 2>(q + row, kRows, items, keys, k.stride, target + row);
      if (two && !wide) score_tiles<2, 1>(q + row, kRows, items, keys, k.stride, target + row);
      if (!two && wide) score_tiles<1, 2>(q + row, kRows, items, keys, k.stride, target + row);
      if (!two && !wide) score_tiles<1, 1>(q + row, kRows, items, keys, k.stride, target + row);
    }
    key += two ? 2 * kTileSide : kTileSide;
  }
}

// V^T of steps begin..end-1, in groups of 16 steps: [group][v_dim, 16], zeros for other steps.
SPECDEC_INLINE void make_value_tiles(const ItemRows& v, int begin, int end, int64_t v_dim,
                                     Item* target) {
  for (int step = begin / kLanes * kLanes; step < end; step += kLanes)
    for (int64_t c = 0; c < v_dim; c += kLanes) {
      U32 square[kLanes];
      for (int i = 0; i < kLanes; ++i)
        square[i] = step + i >= begin && step + i < end ? load_items(v.row(step + i) + c) : U32{};
      transpose(square);
      for (int i = 0; i < kLanes; ++i)
        store_items(target + step * v_dim + (c + i) * kLanes, square[i]);
    }
}

// Adds to kColumnTiles x kRowTiles tiles of the output; weights and out have `rows` columns.
template <int kColumnTiles, int kRowTiles>
SPECDEC_INLINE void add_value_tiles(const float* weights, int64_t rows, const Item* v, int begin,
                                    int end, int64_t v_dim, float* out) {
  const int64_t bytes = rows * int64_t(sizeof(float));
  tile_load<0>(out, bytes);
  if (kRowTiles == 2) tile_load<1>(out + kTileSide, bytes);
  if (kColumnTiles == 2) tile_load<2>(out + kTileSide * rows, bytes);
  if (kColumnTiles == 2 && kRowTiles == 2) tile_load<3>(out + kTileSide * rows + kTileSide, bytes);
  for (int s = begin / kTileSide * kTileSide; s < end; s += kTileSide) {
    tile_load<4>(v + s * v_dim, kTileBytes);
    tile_load<6>(weights + 2 * s * rows, 2 * bytes);
    tile_dot<0, 4, 6>();
    if (kRowTiles == 2) tile_load<7>(weights + 2 * s * rows + kTileSide, 2 * bytes);
    if (kRowTiles == 2) tile_dot<1, 4, 7>();
    if (kColumnTiles == 2) tile_load<5>(v + s * v_dim + kTileSide * kTileSide, kTileBytes);
    if (kColumnTiles == 2) tile_dot<2, 5, 6>();
    if (kColumnTiles == 2 && kRowTiles == 2) tile_dot<3, 5, 7>();
  }
  tile_store<0>(out, bytes);
  if (kRowTiles == 2) tile_store<1>(out + kTileSide, bytes);
  if (kColumnTiles == 2) tile_store<2>(out + kTileSide * rows, bytes);
  if (kColumnTiles == 2 && kRowTiles == 2) tile_store<3>(out + kTileSide * rows + kTileSide, bytes);
}

// Tiles can't be scaled: the old output is, but only when a maximum has grown.
template <int kVectors>
void rescale_panel(const float* rescale, int64_t v_dim, float* out) {
  constexpr int64_t kRows = kVectors * kLanes;
  for (int64_t i = 0; i < kRows; i += kLanes) {
    const F32 factor = load(rescale + i);
    if (!any(factor != 1.0f)) continue;
    for (int64_t c = 0; c < v_dim; ++c)
      store(out + c * kRows + i, load(out + c * kRows + i) * factor);
  }
}

template <int kVectors>
void value_panel_in_tiles(const float* weights, const Item* v, int begin, int end, int64_t v_dim,
                          const float* rescale, float* out) {
  constexpr int64_t kRows = kVectors * kTileSide;
  rescale_panel<kVectors>(rescale, v_dim, out);
  for (int64_t column = 0; column < v_dim; column += 2 * kTileSide) {
    const bool two = column + kTileSide < v_dim;
    const Item* values = v + column * kTileSide;
    float* target = out + column * kRows;
    for (int row = 0; row < kRows; row += 2 * kTileSide) {
      const bool wide = row + kTileSide < kRows;
      const float* w = weights + row;
      if (two && wide) add_value_tiles<2, 2>(w, kRows, values, begin, end, v_dim, target + row);
      if (two && !wide) add_value_tiles<2, 1>(w, kRows, values, begin, end, v_dim, target + row);
      if (!two && wide) add_value_tiles<1, 2>(w, kRows, values, begin, end, v_dim, target + row);
      if (!two && !wide) add_value_tiles<1, 1>(w, kRows, values, begin, end, v_dim, target + row);
    }
  }
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
