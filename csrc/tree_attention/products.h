// The two matrix products of attention over a block of keys, in register tiles.
//
// Few query rows: keys, then columns of V, are the lanes, and each row's items are broadcast. Many
// query rows: the rows are the lanes and the items of K and V are broadcast, so that K is read as
// it lies in the cache. Either way a score, and a column of the output, is one chain of operations
// in the order of the items: a row gets the same bits alone as among 64 others.
#pragma once

#include "tree_attention/keys.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

#if defined(SPECDEC_ISA_avx512)
constexpr int kTileRows = 6;      // x 4 accumulators, of 32 registers
constexpr int kPanelVectors = 4;  // of query rows
#else
constexpr int kTileRows = 3;  // x 4 accumulators, of 16 registers
constexpr int kPanelVectors = 3;
#endif

// ---- few rows

struct FewRows {
  const Item* q;  // [rows, items]
  int64_t items;
  float* scores;  // [rows, kBlockKeys]
  float* out;     // [rows, v_dim], not yet divided by the denominator
  int64_t v_dim;
  const float* rescale;  // [rows], what the new maximum does to the old output
};

template <class M, int kRows>
void few_scores(const FewRows& rows, int row, const Item* keys, int first_key, Ahead& ahead) {
  for (int key = 0; key < kWordKeys; key += 4 * kLanes) {
    F32 sum[kRows][4] = {};
    const Item* q = rows.q + row * rows.items;
    Pace pace(ahead, 2 * kRows);
    for (int64_t s = 0; s < rows.items; ++s) {
      U32 key_items[4];
      pace.turn();
      for (int j = 0; j < 4; ++j)
        key_items[j] = load_items(keys + s * kWordKeys + key + j * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const U32 query = broadcast_item(q + r * rows.items + s);
        for (int j = 0; j < 4; ++j) sum[r][j] = M::add_product(sum[r][j], query, key_items[j]);
      }
    }
    float* scores = rows.scores + row * kBlockKeys + first_key + key;
    for (int r = 0; r < kRows; ++r)
      for (int j = 0; j < 4; ++j) store(scores + r * kBlockKeys + j * kLanes, sum[r][j]);
  }
}

// V as few_values reads it: rows of items, or rows of the cache that become pairs on the way.
template <int kVectors>
SPECDEC_INLINE void load_values(const ItemRows& v, int step, int64_t column,
                                U32 (&values)[kVectors]) {
  const Item* row = v.row(step) + column;
  for (int c = 0; c < kVectors; ++c) values[c] = load_items(row + c * kLanes);
}

struct PairsOfRows {
  const Item* const* rows;
};
template <int kVectors>
SPECDEC_INLINE void load_values(const PairsOfRows& v, int step, int64_t column,
                                U32 (&values)[kVectors]) {
  const Item* even = v.rows[2 * step] + column / 2;
  const Item* odd = v.rows[2 * step + 1] + column / 2;
  for (int c = 0; c < kVectors / 2; ++c)
    interleave_halves(load_items(even + c * kLanes), load_items(odd + c * kLanes), &values[2 * c],
                      &values[2 * c + 1]);
}

// The weights of a row, as items, stand where its scores were.
template <class M, int kRows, int kVectors, class Values>
SPECDEC_INLINE void few_values_tile(const FewRows& rows, int row, const Values& v, int begin,
                                    int end, int64_t column, Ahead& ahead) {
  F32 sum[kRows][kVectors];
  float* out = rows.out + row * rows.v_dim + column;
  const Item* weights = (const Item*)(rows.scores + row * kBlockKeys);
  Pace pace(ahead,
            (kRows * kVectors + 1) / 2 + (M::kElements == 2 ? kVectors * kInterleaveWork : 0));
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kVectors; ++c)
      sum[r][c] = load(out + r * rows.v_dim + c * kLanes) * rows.rescale[row + r];
  for (int s = begin; s < end; ++s) {
    U32 value_items[kVectors];
    pace.turn();
    load_values(v, s, column, value_items);
    for (int r = 0; r < kRows; ++r) {
      const U32 weight = broadcast_item(weights + r * kBlockKeys + s);
      for (int c = 0; c < kVectors; ++c)
        sum[r][c] = M::add_product(sum[r][c], weight, value_items[c]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kVectors; ++c) store(out + r * rows.v_dim + c * kLanes, sum[r][c]);
}

template <class M, int kRows, class Values>
void few_values(const FewRows& rows, int row, const Values& v, int begin, int end, Ahead& ahead) {
  constexpr int kVectors = kRows == 1 ? 8 : 4;
  int64_t column = 0;
  for (; column + kVectors * kLanes <= rows.v_dim; column += kVectors * kLanes)
    few_values_tile<M, kRows, kVectors>(rows, row, v, begin, end, column, ahead);
  for (; column + 2 * kLanes <= rows.v_dim; column += 2 * kLanes)
    few_values_tile<M, kRows, 2>(rows, row, v, begin, end, column, ahead);
  for (; column < rows.v_dim; column += kLanes)
    few_values_tile<M, kRows, 1>(rows, row, v, begin, end, column, ahead);
}

// Calls body(first row, number of rows as a type) with the rows in even groups of <= kTileRows.
template <int n>
struct Count {
  static constexpr int value = n;
};
template <class Body>
SPECDEC_INLINE void for_each_tile(int rows, const Body& body) {
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  for (int tile = 0, row = 0; tile < tiles; ++tile) {
    const int size = (rows - row + tiles - tile - 1) / (tiles - tile);
    if (size == 1) body(row, Count<1>());
    if (size == 2) body(row, Count<2>());
    if (size == 3) body(row, Count<3>());
#if defined(SPECDEC_ISA_avx512)
    if (size == 4) body(row, Count<4>());
    if (size == 5) body(row, Count<5>());
    if (size == 6) body(row, Count<6>());
#endif
    row += size;
  }
}

// ---- many rows: a panel is kVectors vectors of rows

// Rows of the other operand per tile: multiples of 16 keys and of kLanes columns are whole tiles.
constexpr int tile_height(int vectors) {
#if defined(SPECDEC_ISA_avx512)
  return vectors == 1 ? 16 : vectors == 4 ? 4 : 8;
#else
  return vectors == 1 && kLanes >= 8 ? 8 : 4;
#endif
}

constexpr int kPaceSteps = 8;  // between two requests for rows of the next block

// scores [kBlockKeys, vectors * kLanes] of keys; q is [items, vectors * kLanes].
template <class M, int kKeys, int kVectors>
SPECDEC_INLINE void score_tile(const Item* q, int64_t items, const char* keys, int64_t stride,
                               Ahead& ahead, float* scores) {
  constexpr int kRows = kVectors * kLanes;
  F32 sum[kKeys][kVectors] = {};
  Pace pace(ahead, kKeys * kVectors / 2 * kPaceSteps);
  for (int64_t left = items; left > 0; left -= kPaceSteps) {
    pace.turn();
    const int64_t steps = min64(left, kPaceSteps);
    for (int64_t s = 0; s < steps; ++s, q += kRows, keys += sizeof(Item)) {
      U32 query[kVectors];
      for (int v = 0; v < kVectors; ++v) query[v] = load_items(q + v * kLanes);
      const char* four = keys;  // and the three after it: few registers hold all addresses
      for (int j = 0; j < kKeys; j += 4, four += 4 * stride) {
        asm("" : "+r"(four));
        for (int i = 0; i < 4; ++i) {
          const U32 key = broadcast_item((const Item*)(four + i * stride));
          for (int v = 0; v < kVectors; ++v)
            sum[j + i][v] = M::add_product(sum[j + i][v], query[v], key);
        }
      }
    }
  }
  for (int j = 0; j < kKeys; ++j)
    for (int v = 0; v < kVectors; ++v) store(scores + j * kRows + v * kLanes, sum[j][v]);
}

template <class M, int kVectors>
void score_panel(const Item* q, int64_t items, const ItemRows& k, int first, int count,
                 Ahead& ahead, float* scores) {
  constexpr int kKeys = tile_height(kVectors);
  for (int key = first / kTileKeys * kTileKeys; key < count; key += kKeys) {
    score_tile<M, kKeys, kVectors>(q, items, (const char*)k.row(key), k.stride, ahead,
                                   scores + key * kVectors * kLanes);
  }
}

// out [v_dim, vectors * kLanes]; weights: row s * M::kElements holds the items of step s.
template <class M, int kVectors>
void value_panel(const Item* weights, const ItemRows& v, int begin, int end, int64_t v_dim,
                 const float* rescale, Ahead& ahead, float* out) {
  constexpr int kRows = kVectors * kLanes, kColumns = tile_height(kVectors);
  Pace pace(ahead, kColumns * kVectors / 2 * kPaceSteps);
  for (int64_t column = 0; column < v_dim; column += kColumns, out += kColumns * kRows) {
    F32 sum[kColumns][kVectors];
    for (int i = 0; i < kVectors; ++i) {
      const F32 factor = load(rescale + i * kLanes);
      for (int c = 0; c < kColumns; ++c) sum[c][i] = load(out + c * kRows + i * kLanes) * factor;
    }
    const char* values = (const char*)(v.row(begin) + column);
    const Item* weight_items = weights + begin * M::kElements * kRows;
    for (int left = end - begin; left > 0; left -= kPaceSteps) {
      pace.turn();
      const int steps = left < kPaceSteps ? left : kPaceSteps;
      for (int s = 0; s < steps; ++s, values += v.stride) {
        U32 weight[kVectors];
        for (int i = 0; i < kVectors; ++i) weight[i] = load_items(weight_items + i * kLanes);
        weight_items += M::kElements * kRows;
        for (int c = 0; c < kColumns; ++c) {
          const U32 value = broadcast_item((const Item*)values + c);
          for (int i = 0; i < kVectors; ++i)
            sum[c][i] = M::add_product(sum[c][i], weight[i], value);
        }
      }
    }
    for (int c = 0; c < kColumns; ++c)
      for (int i = 0; i < kVectors; ++i) store(out + c * kRows + i * kLanes, sum[c][i]);
  }
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
