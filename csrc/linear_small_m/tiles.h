// The outputs of one thread by matrix tiles, for bf16: 16 rows of the weight, straight from memory,
// times up to four tiles of 16 rows of x.
//
// The rows of a tile are not neighbours. A window of the weight is read as 16 streams at once, each
// upwards through `length` rows that lie one behind the other, which the hardware prefetchers
// reward; block i of the window holds row i of every stream. Nothing comes from memory while sums
// are stored, so that is done for a whole window, in long pieces.
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
constexpr int64_t kTileSums = kTileSide * kTileSide;
constexpr int64_t kWindowTiles = 32;        // of sums, which stay in the caches next to the core
constexpr int64_t kStored = 2 * kTileSide;  // outputs of a row that are stored at once
constexpr int64_t kAheadSteps = 5;          // how far ahead a stream is asked for, in tiles
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

// `rows` rows of the weight that lie `stride` elements apart; those of the next block start at
// `next`.
struct Block16 {
  const BFloat16* w;
  int64_t rows;
  int64_t stride;
  const BFloat16* next;
};

// Sums for [kTiles, rows of the weight, 16 rows of x], with these strides.
struct Sums {
  float* data;
  int64_t tile_stride;
  int64_t row_stride;
};

// Sums of products over all of k.
template <int kTiles>
void multiply_tiles(const Block16& block, const BFloat16* x, int64_t x_stride, int64_t k,
                    const Sums& sums) {
  tile_zero<0>();
  if constexpr (kTiles > 1) tile_zero<1>();
  if constexpr (kTiles > 2) tile_zero<2>();
  if constexpr (kTiles > 3) tile_zero<3>();
  const int64_t stride_bytes = block.stride * int64_t(sizeof(BFloat16));
  const int64_t steps = block.rows == kTileSide ? k / kTileDepth : 0;
  const BFloat16* w = block.w;
  for (int64_t step = 0; step < steps; ++step, w += kTileDepth, x += kTileElements) {
    const int64_t ahead = step + kAheadSteps;
    const BFloat16* line =
        ahead < steps ? block.w + ahead * kTileDepth : block.next + (ahead - steps) * kTileDepth;
    _Pragma("GCC unroll 16") for (int row = 0; row < kTileSide; ++row, line += block.stride)
        __builtin_prefetch(line, 0, 3);
    dot_step<kTiles>(w, stride_bytes, x, x_stride);
  }
  for (int64_t left = k - steps * kTileDepth; left > 0; left -= kTileDepth) {
    const int64_t count = left < kTileDepth ? left : kTileDepth;
    BFloat16 padded[kTileElements] = {};  // a tile at the edge of the matrix
    for (int64_t row = 0; row < block.rows; ++row)
      std::memcpy(padded + row * kTileDepth, w + row * block.stride, count * sizeof(BFloat16));
    dot_step<kTiles>(padded, kTileBytes, x, x_stride);
    w += kTileDepth;
    x += kTileElements;
  }
  const int64_t row_bytes = sums.row_stride * int64_t(sizeof(float));
  tile_store<0>(sums.data, row_bytes);
  if constexpr (kTiles > 1) tile_store<1>(sums.data + sums.tile_stride, row_bytes);
  if constexpr (kTiles > 2) tile_store<2>(sums.data + 2 * sums.tile_stride, row_bytes);
  if constexpr (kTiles > 3) tile_store<3>(sums.data + 3 * sums.tile_stride, row_bytes);
}

// The first `count` elements of `pairs`.
SPECDEC_INLINE void store_first(BFloat16* target, U32 pairs, int64_t count) {
#if defined(__AVX512BW__) && defined(SPECDEC_ISA_avx512)
  const __mmask32 mask = __mmask32((uint64_t(1) << count) - 1);
  _mm512_mask_storeu_epi16(target, mask, (__m512i)pairs);
#else
  std::memcpy(target, &pairs, count * sizeof(BFloat16));
#endif
}

// Rounds, turns and stores `count` <= kStored outputs from n on, of up to 16 rows from m on, with
// the bias. There are sums for kStored outputs, [kStored, 16 rows].
void store_outputs(const LinearSmallMParams& p, int64_t m, int64_t n, int64_t count,
                   const float* sums) {
  const BFloat16* bias = p.bias == nullptr ? nullptr : static_cast<const BFloat16*>(p.bias) + n;
  U32 pairs[kTileSide];
  for (int64_t i = 0; i < kStored; i += 2) {
    F32 first = load(sums + i * kTileSide), second = load(sums + (i + 1) * kTileSide);
    if (bias != nullptr) {
      if (i < count) first += broadcast(to_float(bias[i]));
      if (i + 1 < count) second += broadcast(to_float(bias[i + 1]));
    }
    pairs[i / 2] = make_pairs(first, second);
  }
  transpose(pairs);
  const int64_t rows = p.m - m < kTileSide ? p.m - m : kTileSide;
  BFloat16* y = static_cast<BFloat16*>(p.y) + m * p.n + n;
  for (int64_t r = 0; r < rows; ++r, y += p.n) store_first(y, pairs[r], count);
}

// y[m0:, n0:n1] for the rows of x in `tiles` packed tiles.
void multiply_windows(const LinearSmallMParams& p, int64_t m0, int64_t tiles, const BFloat16* x,
                      int64_t x_stride, int64_t n0, int64_t n1, float* sums) {
  typedef void (*Multiply)(const Block16& block, const BFloat16* x, int64_t x_stride, int64_t k,
                           const Sums& sums);
  constexpr Multiply kMultiply[] = {multiply_tiles<1>, multiply_tiles<2>, multiply_tiles<3>,
                                    multiply_tiles<4>};
  const BFloat16* weight = static_cast<const BFloat16*>(p.weight);
  const int64_t most = kWindowTiles / tiles, tile_stride = most * kTileSums;
  for (int64_t n = n0; n < n1;) {
    const int64_t blocks = (n1 - n) / kTileSide, windows = (blocks + most - 1) / most;
    const int64_t length = blocks == 0 ? 1 : (blocks + windows - 1) / windows;
    const int64_t rows = blocks == 0 ? n1 - n : kTileSide, outputs = rows * length;
    const BFloat16* w = weight + n * p.weight_stride;
    for (int64_t i = 0; i < length; ++i) {
      const BFloat16* next = w + (i + 1 < length ? i + 1 : outputs) * p.weight_stride;
      kMultiply[tiles - 1]({w + i * p.weight_stride, rows, length * p.weight_stride, next}, x,
                           x_stride, p.k, {sums + i * kTileSide, tile_stride, length * kTileSide});
    }
    for (int64_t done = 0; done < outputs; done += kStored)
      for (int64_t t = 0; t < tiles; ++t)
        store_outputs(p, m0 + t * kTileSide, n + done,
                      outputs - done < kStored ? outputs - done : kStored,
                      sums + t * tile_stride + done * kTileSide);
    n += outputs;
  }
}

// y[:, n0:n1]. Returns false when memory runs out.
bool multiply_columns_by_tiles(const LinearSmallMParams& p, int64_t n0, int64_t n1) {
  const int64_t steps = p.k == 0 ? 1 : (p.k + kTileDepth - 1) / kTileDepth;
  const int64_t x_stride = steps * kTileElements;
  auto* const packed =
      static_cast<BFloat16*>(thread_scratch(0, kMaxTiles * x_stride * int64_t(sizeof(BFloat16))));
  auto* const sums = static_cast<float*>(
      thread_scratch(1, (kWindowTiles + 1) * kTileSums * int64_t(sizeof(float))));
  if (packed == nullptr || sums == nullptr) return false;
  const TileScope scope;
  for (int64_t m0 = 0; m0 < p.m; m0 += kMaxTiles * kTileSide) {
    int64_t tiles = 0;
    for (int64_t m = m0; m < p.m && tiles < kMaxTiles; m += kTileSide, ++tiles)
      pack_tiles(static_cast<const BFloat16*>(p.x) + m * p.x_stride, p.x_stride,
                 p.m - m < kTileSide ? p.m - m : kTileSide, p.k, packed + tiles * x_stride);
    multiply_windows(p, m0, tiles, packed, x_stride, n0, n1, sums);
  }
  return true;
}

#endif

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
