// The eight matrix tiles of AMX, 16 rows of 64 bytes each, or an emulation of them.
//
// tile_dot adds A * B to C: A holds 16 rows of 32 bf16 values; row k of B holds the pairs
// (2k, 2k + 1) of its 16 columns, next to each other; C holds 16 x 16 fp32 values.
#pragma once

#include "common/vec.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

#if defined(SPECDEC_ISA_amx)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

constexpr int kTileSide = 16;   // rows of every tile, and columns of C
constexpr int kTileDepth = 32;  // bf16 values of a row of A
constexpr int kTileBytes = 64;  // of one row

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// While one lives, the thread may use tiles.
struct TileScope {
  TileScope() {
    const TileConfig config;
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~TileScope() { asm volatile("tilerelease"); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

// Spelled out, because GCC's own intrinsics don't say that they read memory.
template <int tile>
SPECDEC_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(tile));
}
template <int tile>
SPECDEC_INLINE void tile_load(const void* rows, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
               :
               : "r"(rows), "r"(stride_bytes), "i"(tile)
               : "memory");
}
template <int tile>
SPECDEC_INLINE void tile_store(void* rows, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
               :
               : "r"(rows), "r"(stride_bytes), "i"(tile)
               : "memory");
}
template <int c, int a, int b>
SPECDEC_INLINE void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

#else

struct EmulatedTile {
  unsigned char rows[kTileSide][kTileBytes];
};
thread_local EmulatedTile emulated_tiles[8];

struct TileScope {
  // Whoever reads a tile that was neither loaded nor zeroed gets NaN.
  TileScope() { std::memset(emulated_tiles, 0xff, sizeof(emulated_tiles)); }
  ~TileScope() { std::memset(emulated_tiles, 0xff, sizeof(emulated_tiles)); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

template <int tile>
void tile_zero() {
  std::memset(&emulated_tiles[tile], 0, sizeof(EmulatedTile));
}
template <int tile>
void tile_load(const void* rows, int64_t stride_bytes) {
  for (int r = 0; r < kTileSide; ++r)
    std::memcpy(emulated_tiles[tile].rows[r], static_cast<const char*>(rows) + r * stride_bytes,
                kTileBytes);
}
template <int tile>
void tile_store(void* rows, int64_t stride_bytes) {
  for (int r = 0; r < kTileSide; ++r)
    std::memcpy(static_cast<char*>(rows) + r * stride_bytes, emulated_tiles[tile].rows[r],
                kTileBytes);
}
template <int c, int a, int b>
void tile_dot() {
  for (int row = 0; row < kTileSide; ++row) {
    float sums[kTileSide], even[kTileSide] = {}, odd[kTileSide] = {};
    BFloat16 left[kTileDepth], right[kTileDepth];
    std::memcpy(sums, emulated_tiles[c].rows[row], kTileBytes);
    std::memcpy(left, emulated_tiles[a].rows[row], kTileBytes);
    for (int k = 0; k < kTileSide; ++k) {
      std::memcpy(right, emulated_tiles[b].rows[k], kTileBytes);
      for (int n = 0; n < kTileSide; ++n) {
        even[n] += to_float(left[2 * k]) * to_float(right[2 * n]);
        odd[n] += to_float(left[2 * k + 1]) * to_float(right[2 * n + 1]);
      }
    }
    for (int n = 0; n < kTileSide; ++n) sums[n] += even[n] + odd[n];
    std::memcpy(emulated_tiles[c].rows[row], sums, kTileBytes);
  }
}

#endif

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
