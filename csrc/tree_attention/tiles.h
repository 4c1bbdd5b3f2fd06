// The two matrix products of attention over a block of keys, in register tiles.
//
// Every (row, key) score and every (row, column) output is one chain of operations whose order does
// not depend on the tile that computes it: a row gets the same bits alone as among 64 others.
#pragma once

#include "tree_attention/softmax_math.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

constexpr int kBlockKeys = 64;  // also the width of a word of visibility bits
#if defined(SPECDEC_ISA_avx512)
constexpr int kTileRows = 6;  // x 4 accumulators, of 32 registers
#else
constexpr int kTileRows = 3;  // x 4 accumulators, of 16 registers
#endif

// Keys first..count-1 of a block, one pointer per K and V row. In k, the other entries repeat a
// valid row: their scores are computed and then masked. Rows hold whole vectors.
template <class E>
struct KeyBlock {
  const E* k[kBlockKeys];
  const E* v[kBlockKeys];
  int first;
  int count;
};

// Rows of the tile's working memory; all row strides are whole vectors.
struct RowBlock {
  float* q;        // [rows, dim], scaled
  float* out;      // [rows, v_dim], not yet divided by the denominator
  float* scores;   // [rows, kBlockKeys]
  float* rescale;  // [rows], what the new maximum does to the old output
  int rows;
  int64_t dim;
  int64_t v_dim;
};

template <class E, int kRows, int kKeys>
SPECDEC_INLINE void score_tile(const RowBlock& rows, int row, const E* const* k, int key) {
  F32 sum[kRows][kKeys] = {};
  const float* q = rows.q + row * rows.dim;
  for (int64_t d = 0; d < rows.dim; d += kLanes) {
    F32 query[kRows];
    for (int r = 0; r < kRows; ++r) query[r] = load(q + r * rows.dim + d);
    for (int j = 0; j < kKeys; ++j) {
      const F32 value = load(k[key + j] + d);
      for (int r = 0; r < kRows; ++r) sum[r][j] = fma(query[r], value, sum[r][j]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kKeys; j += 4)
      store_sums(rows.scores + (row + r) * kBlockKeys + key + j, sum[r][j], sum[r][j + 1],
                 sum[r][j + 2], sum[r][j + 3]);
}

template <class E, int kRows, int kVectors>
SPECDEC_INLINE void value_tile(const RowBlock& rows, int row, const KeyBlock<E>& block,
                               int64_t column) {
  F32 sum[kRows][kVectors];
  float* out = rows.out + row * rows.v_dim + column;
  const float* weights = rows.scores + row * kBlockKeys;
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kVectors; ++c)
      sum[r][c] = load(out + r * rows.v_dim + c * kLanes) * rows.rescale[row + r];
  for (int key = block.first; key < block.count; ++key) {
    F32 weight[kRows];
    for (int r = 0; r < kRows; ++r) weight[r] = broadcast(weights[r * kBlockKeys + key]);
    for (int c = 0; c < kVectors; ++c) {
      const F32 value = load(block.v[key] + column + c * kLanes);
      for (int r = 0; r < kRows; ++r) sum[r][c] = fma(weight[r], value, sum[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kVectors; ++c) store(out + r * rows.v_dim + c * kLanes, sum[r][c]);
}

// Keys are taken 16 at a time, so that they stay in the first-level cache for all rows.
template <class E, int kRows>
void score_rows(const RowBlock& rows, int row, const KeyBlock<E>& block, int begin, int end) {
  constexpr int kKeys = kRows == 1 ? 8 : 4;
  for (int key = begin & ~(kKeys - 1); key < end; key += kKeys)
    score_tile<E, kRows, kKeys>(rows, row, block.k, key);
}

template <class E, int kRows>
void value_rows(const RowBlock& rows, int row, const KeyBlock<E>& block, int64_t begin,
                int64_t end) {
  constexpr int kVectors = kRows == 1 ? 8 : 4;
  int64_t column = begin;
  for (; column + kVectors * kLanes <= end; column += kVectors * kLanes)
    value_tile<E, kRows, kVectors>(rows, row, block, column);
  for (; column + 2 * kLanes <= end; column += 2 * kLanes)
    value_tile<E, kRows, 2>(rows, row, block, column);
  for (; column < end; column += kLanes) value_tile<E, kRows, 1>(rows, row, block, column);
}

// Calls body(first row, number of rows) with the rows cut into even groups of at most kTileRows.
template <class Body>
SPECDEC_INLINE void for_each_tile(int rows, const Body& body) {
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  for (int tile = 0, row = 0; tile < tiles; ++tile) {
    const int size = (rows - row + tiles - tile - 1) / (tiles - tile);
    body(row, size);
    row += size;
  }
}

template <class E>
void score_block(const RowBlock& rows, const KeyBlock<E>& block) {
  for (int begin = block.first; begin < block.count;) {
    const int end = (begin / 16 + 1) * 16 < block.count ? (begin / 16 + 1) * 16 : block.count;
    for_each_tile(rows.rows, [&](int row, int size) {
      if (size == 1) return score_rows<E, 1>(rows, row, block, begin, end);
      if (size == 2) return score_rows<E, 2>(rows, row, block, begin, end);
      if (size == 3) return score_rows<E, 3>(rows, row, block, begin, end);
#if defined(SPECDEC_ISA_avx512)
      if (size == 4) return score_rows<E, 4>(rows, row, block, begin, end);
      if (size == 5) return score_rows<E, 5>(rows, row, block, begin, end);
      return score_rows<E, 6>(rows, row, block, begin, end);
#endif
    });
    begin = end;
  }
}

template <class E>
void value_block(const RowBlock& rows, const KeyBlock<E>& block) {
  const int64_t panel = (rows.rows == 1 ? 8 : 4) * kLanes;
  for (int64_t begin = 0; begin < rows.v_dim; begin += panel) {
    const int64_t end = begin + panel < rows.v_dim ? begin + panel : rows.v_dim;
    for_each_tile(rows.rows, [&](int row, int size) {
      if (size == 1) return value_rows<E, 1>(rows, row, block, begin, end);
      if (size == 2) return value_rows<E, 2>(rows, row, block, begin, end);
      if (size == 3) return value_rows<E, 3>(rows, row, block, begin, end);
#if defined(SPECDEC_ISA_avx512)
      if (size == 4) return value_rows<E, 4>(rows, row, block, begin, end);
      if (size == 5) return value_rows<E, 5>(rows, row, block, begin, end);
      return value_rows<E, 6>(rows, row, block, begin, end);
#endif
    });
  }
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
