// The outputs of one thread by matrix tiles, for bf16: 16 rows of the weight, straight from memory,
// times up to four tiles of 16 rows of x.
#pragma once

#include "common/amx.h"
#include "common/bf16_dot.h"
#include "common/scratch.h"
#include "linear_small_m/linear_small_m.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

#if defined(SPECDEC_ISA_amx)

constexpr int64_t kMaxTiles = 4;  // of x, accumulated at once
constexpr int64_t kTileElements = kTileSide * kTileDepth;
static_assert(kLanes == kTileSide, "a vector holds a row of a tile");

// Up to 16 rows of x as B tiles, one per step of k: its pairs go down the columns. Zeros stand
// behind the end of k and in columns without a row, but a single row fills all columns.
void pack_tiles(const BFloat16* x, int64_t stride, int64_t rows, int64_t k, BFloat16* packed) {
  for (int64_t at = 0; at < k || at == 0; at += kTileDepth, packed += kTileElements) {
    const int64_t count = k - at < kTileDepth ? k - at : kTileDepth;
    U32 pairs[kTileSide] = {};
    for (int64_t r = 0; r < rows; ++r)
      if (count == kTileDepth)
        pairs[r] = load_pairs(x + r * stride + at);
      else if (count > 0)
        std::memcpy(&pairs[r], x + r * stride + at, count * sizeof(BFloat16));
    if (rows == 1)
      for (int i = kTileSide - 1; i >= 0; --i) pairs[i] = pairs[0][i] - U32{};
    else
      transpose(pairs);
    std::memcpy(packed, pairs, sizeof(pairs));
  }
}

// Tiles 0 to 3 accumulate; 4 holds weights and 5 and 6 take turns with x.
template <int kTiles>
SPECDEC_INLINE void dot_step(const BFloat16* w, int64_t stride_bytes, const BFloat16* x,
                             int64_t x_stride) {
  tile_load<4>(w, stride_bytes);
  tile_load<5>(x, kTileBytes);
  tile_dot<0, 4, 5>();
  if constexpr (kTiles > 1) {
    tile_load<6>(x + x_stride, kTileBytes);
    tile_dot<1, 4, 6>();
  }
  if constexpr (kTiles > 2) {
    tile_load<5>(x + 2 * x_stride, kTileBytes);
    tile_dot<2, 4, 5>();
  }
  if constexpr (kTiles > 3) {
    tile_load<6>(x + 3 * x_stride, kTileBytes);
    tile_dot<3, 4, 6>();
  }
}

// `rows` rows of the weight; the rows that lie `ahead` elements further on are asked for meanwhile.
struct WeightTile {
  const BFloat16* w;
  int64_t stride;
  int64_t rows;
  int64_t ahead;
};

// Sums of products over all of k, [kTiles, 16 rows of the weight, 16 rows of x] in `sums`.
template <int kTiles>
void multiply_tiles(const WeightTile& tile, const BFloat16* x, int64_t x_stride, int64_t k,
                    float* sums) {
  tile_zero<0>();
  if constexpr (kTiles > 1) tile_zero<1>();
  if constexpr (kTiles > 2) tile_zero<2>();
  if constexpr (kTiles > 3) tile_zero<3>();
  const int64_t stride_bytes = tile.stride * int64_t(sizeof(BFloat16));
  const BFloat16* w = tile.w;
  int64_t left = k;
  if (tile.rows == kTileSide) {
    for (; left >= kTileDepth; left -= kTileDepth, w += kTileDepth, x += kTileElements) {
      const BFloat16* line = w + tile.ahead;
      _Pragma("GCC unroll 16") for (int row = 0; row < kTileSide; ++row, line += tile.stride)
          __builtin_prefetch(line, 0, 2);
      dot_step<kTiles>(w, stride_bytes, x, x_stride);
    }
  }
  for (; left > 0; left -= kTileDepth, w += kTileDepth, x += kTileElements) {
    const int64_t count = left < kTileDepth ? left : kTileDepth;
    BFloat16 padded[kTileElements] = {};  // a tile at the edge of the matrix
    for (int64_t row = 0; row < tile.rows; ++row)
      std::memcpy(padded + row * kTileDepth, w + row * tile.stride, count * sizeof(BFloat16));
    dot_step<kTiles>(padded, kTileBytes, x, x_stride);
  }
  tile_store<0>(sums, kTileBytes);
  if constexpr (kTiles > 1) tile_store<1>(sums + kTileSide * kTileSide, kTileBytes);
  if constexpr (kTiles > 2) tile_store<2>(sums + 2 * kTileSide * kTileSide, kTileBytes);
  if constexpr (kTiles > 3) tile_store<3>(sums + 3 * kTileSide * kTileSide, kTileBytes);
}

// Turns, rounds and stores `count` outputs from n on, of `rows` rows from m on, with the bias.
void store_tile(const LinearSmallMParams& p, int64_t m, int64_t rows, int64_t n, int64_t count,
                const float* sums) {
  U32 columns[kTileSide];
  std::memcpy(columns, sums, sizeof(columns));
  transpose(columns);
  F32 bias = {};
  if (p.bias != nullptr)
    bias = load_partial(static_cast<const BFloat16*>(p.bias) + n, int(count), 0.0f);
  for (int64_t r = 0; r < rows; ++r) {
    const F32 value = bit_cast<F32>(columns[r]);
    const F32 result = p.bias == nullptr ? value : value + bias;
    BFloat16* y = static_cast<BFloat16*>(p.y) + (m + r) * p.n + n;
    if (count == kTileSide)
      store(y, result);
    else
      store_partial(y, result, int(count));
  }
}

// y[:, n0:n1]. Returns false when memory runs out.
bool multiply_columns_by_tiles(const LinearSmallMParams& p, int64_t n0, int64_t n1) {
  typedef void (*Multiply)(const WeightTile& tile, const BFloat16* x, int64_t x_stride, int64_t k,
                           float* sums);
  constexpr Multiply kMultiply[] = {multiply_tiles<1>, multiply_tiles<2>, multiply_tiles<3>,
                                    multiply_tiles<4>};
  const int64_t steps = p.k == 0 ? 1 : (p.k + kTileDepth - 1) / kTileDepth;
  const int64_t x_stride = steps * kTileElements;
  auto* const packed =
      static_cast<BFloat16*>(thread_scratch(0, kMaxTiles * x_stride * int64_t(sizeof(BFloat16))));
  if (packed == nullptr) return false;
  alignas(64) float sums[kMaxTiles * kTileSide * kTileSide];
  const TileScope scope;
  for (int64_t m0 = 0; m0 < p.m; m0 += kMaxTiles * kTileSide) {
    int64_t tiles = 0;
    for (int64_t m = m0; m < p.m && tiles < kMaxTiles; m += kTileSide, ++tiles)
      pack_tiles(static_cast<const BFloat16*>(p.x) + m * p.x_stride, p.x_stride,
                 p.m - m < kTileSide ? p.m - m : kTileSide, p.k, packed + tiles * x_stride);
    for (int64_t n = n0; n < n1; n += kTileSide) {
      const int64_t rows = n1 - n < kTileSide ? n1 - n : kTileSide;
      const bool more = n1 - n >= 2 * kTileSide;
      const WeightTile tile{static_cast<const BFloat16*>(p.weight) + n * p.weight_stride,
                            p.weight_stride, rows, more ? kTileSide * p.weight_stride : 0};
      kMultiply[tiles - 1](tile, packed, x_stride, p.k, sums);
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t m = m0 + t * kTileSide, left = p.m - m;
        store_tile(p, m, left < kTileSide ? left : kTileSide, n, rows,
                   sums + t * kTileSide * kTileSide);
      }
    }
  }
  return true;
}

#endif

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
