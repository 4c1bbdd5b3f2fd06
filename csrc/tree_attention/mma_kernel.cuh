// The kernel for Ampere and everything after it: cp.async, ldmatrix and mma.sync.
//
// Of every byte of a KV head's cache one block makes use for all of its rows, up to 256; the keys
// of a row are split over blocks. Two barriers per tile: at the first one the keys have arrived and
// the values of the tile before are used up, at the second one the values have arrived and the keys
// are used up.
#pragma once

#include "common/launch.cuh"
#include "tree_attention/epilogue.cuh"

namespace specdec {

constexpr int kSharedLimit = 101376;  // bytes a block may have on the smallest GPU, sm_120

// kRowWarps * kKeyWarps warps: each takes kRowTiles * 16 rows and 1 / kKeyWarps of a tile's keys.
// Key warps make use of a whole block when there are few rows, but add a row's keys in another
// order, so fixed splits, where no bit may depend on the number of rows, go without.
template <class Element_, int kDim_, int kRowWarps_, int kRowTiles_, int kKeyWarps_>
struct MmaConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;  // of keys and of values, whichever is more, rounded up
  static constexpr int kRowWarps = kRowWarps_;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kKeyWarps = kKeyWarps_;
  static constexpr int kThreads = 32 * kRowWarps * kKeyWarps;
  static constexpr int kWarpRows = kFragmentRows * kRowTiles;
  static constexpr int kRows = kWarpRows * kRowWarps;
  static constexpr int kRowBytes = kDim * sizeof(Element);
  // Without key warps it follows from head size and dtype alone, as the order of additions does.
  static constexpr int kTileKeys = kRowBytes <= (kKeyWarps > 1 ? 256 : 128) ? 64
                                   : kRowBytes <= 512                       ? 32
                                                                            : 16;
  static constexpr int kWarpKeys = kTileKeys / kKeyWarps;
  static constexpr int kKeyTiles = kWarpKeys / kFragmentKeys;
  static constexpr int shared_bytes(int stages) {
    return (kRows + 2 * stages * kTileKeys) * kRowBytes;
  }
  static constexpr int kStages = shared_bytes(3) <= kSharedLimit   ? 3
                                 : shared_bytes(2) <= kSharedLimit ? 2
                                                                   : 1;
  static constexpr int kSharedBytes = shared_bytes(kStages);

  // Where key warps join their results: rows are padded so that they start in different banks.
  static constexpr int kJoinStride = kDim + 8;
  static constexpr int kJoinFloats = kFragmentRows * (kJoinStride + 2);  // of one warp
  // Blocks that shall find room on a multiprocessor, of whose registers they take the most.
  static constexpr int kBlocks = kThreads <= 128 && sizeof(Element) == 2 && kDim <= 128 ? 3 : 1;
  static_assert(kSharedBytes <= kSharedLimit, "too much shared memory");
  static_assert(kKeyWarps == 1 || (kRows == kFragmentRows &&
                                   kKeyWarps * kJoinFloats * int(sizeof(float)) <= kSharedBytes),
                "key warps join their results in the memory of the tiles");
  static_assert(kDim / 8 % kKeyWarps == 0, "every key warp writes the same number of columns");
};

struct MmaOptions {
  bool whole_queries, whole_keys, whole_values;  // can be copied in chunks of 16 bytes
};

template <class C>
struct MmaTiles {
  using Element = typename C::Element;
  static constexpr int kTile = C::kTileKeys * C::kDim;
  Element* queries;
  Element* keys;    // [stages][kTile]
  Element* values;  // [stages][kTile]
  __device__ explicit MmaTiles(unsigned char* shared)
      : queries(reinterpret_cast<Element*>(shared)),
        keys(queries + C::kRows * C::kDim),
        values(keys + C::kStages * kTile) {}
};

// One warp's rows and what they have seen so far.
template <class C>
struct MmaRows {
  Fragment out[C::kRowTiles][C::kDim / 8] = {};
  SoftmaxState state[C::kRowTiles];
};

// The tiles of the unit, all threads.
template <class C>
__device__ __forceinline__ void attend(const TreeAttentionParams& p, const AttentionUnit& u,
                                       const MmaOptions& options, const MmaTiles<C>& tiles,
                                       int first_row, int key_of_warp, MmaRows<C>& rows) {
  using Element = typename C::Element;
  constexpr int kPending = 2 * (C::kStages - 1);  // groups after the one that is waited for
  const CacheRows<Element> keys(p, u, p.k), values(p, u, p.v);
  const ScoreScale scale(p);
  const auto load_k = [&](int tile) {
    if (tile < u.tile_end)
      load_keys<Element, C::kDim, C::kTileKeys, C::kThreads>(
          tiles.keys + tile % C::kStages * tiles.kTile, keys, u, tile * C::kTileKeys,
          static_cast<int>(p.dim), options.whole_keys);
    cp_async_commit();
  };
  const auto load_v = [&](int tile) {
    if (tile < u.tile_end)
      load_keys<Element, C::kDim, C::kTileKeys, C::kThreads>(
          tiles.values + tile % C::kStages * tiles.kTile, values, u, tile * C::kTileKeys,
          static_cast<int>(p.v_dim), options.whole_values);
    cp_async_commit();
  };
  load_queries<Element, C::kDim, C::kRows, C::kThreads>(tiles.queries, p, u, options.whole_queries);
  load_k(u.tile_begin);  // in one group with the queries
  for (int stage = 1; stage < C::kStages; ++stage) {
    load_v(u.tile_begin + stage - 1);
    load_k(u.tile_begin + stage);
  }
  const bool has_rows = first_row < u.live_rows;
  for (int tile = u.tile_begin; tile < u.tile_end; ++tile) {
    const int first_key = tile * C::kTileKeys + key_of_warp;
    Fragment scores[C::kRowTiles][C::kKeyTiles] = {};
    cp_async_wait<kPending>();
    __syncthreads();
    load_v(tile + C::kStages - 1);
    if (has_rows) {
      multiply_keys<Element, C::kDim>(scores, tiles.queries, first_row,
                                      tiles.keys + tile % C::kStages * tiles.kTile, key_of_warp);
      weigh_tiles<Element>(p, u, scale, first_key, first_row, kFragmentRows, scores, rows.state,
                           rows.out);
    }
    cp_async_wait<kPending>();
    __syncthreads();
    load_k(tile + C::kStages);
    if (has_rows)
      multiply_values<Element, C::kDim>(
          rows.out, scores, tiles.values + tile % C::kStages * tiles.kTile, key_of_warp);
  }
  cp_async_wait<0>();
#pragma unroll
  for (SoftmaxState& state : rows.state) state.join_lanes();
}

// The key warps' results become one: each gets its part of the columns, in the first fragments.
template <class C>
__device__ __forceinline__ void join_key_warps(float* shared, int key_warp,
                                               Fragment (&out)[C::kDim / 8], SoftmaxState& state) {
  constexpr int kTiles = C::kDim / 8 / C::kKeyWarps;
  const int lane = threadIdx.x % 32;
  __syncthreads();  // the tiles are used up
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    float* own = shared + key_warp * C::kJoinFloats;
#pragma unroll
    for (int n = 0; n < C::kDim / 8; ++n)
      *reinterpret_cast<float2*>(own + row * C::kJoinStride + n * 8 + lane % 4 * 2) =
          make_float2(out[n].values[2 * half], out[n].values[2 * half + 1]);
    own[kFragmentRows * C::kJoinStride + row] = state.max[half];
    own[kFragmentRows * (C::kJoinStride + 1) + row] = state.sum[half];
  }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    const float* maxima = shared + kFragmentRows * C::kJoinStride + row;
    float max = -kInfinity, sum = 0.0f;
    for (int warp = 0; warp < C::kKeyWarps; ++warp) max = fmaxf(max, maxima[warp * C::kJoinFloats]);
    float joined[kTiles][2] = {};
    for (int warp = 0; warp < C::kKeyWarps; ++warp) {
      const float* other = shared + warp * C::kJoinFloats;
      const float weight = exp2_approx(maxima[warp * C::kJoinFloats] - finite_base(max));
      sum = fmaf(other[kFragmentRows * (C::kJoinStride + 1) + row], weight, sum);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float2 pair = *reinterpret_cast<const float2*>(
            other + row * C::kJoinStride + (key_warp * kTiles + n) * 8 + lane % 4 * 2);
        joined[n][0] = fmaf(pair.x, weight, joined[n][0]);
        joined[n][1] = fmaf(pair.y, weight, joined[n][1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      out[n].values[2 * half] = joined[n][0], out[n].values[2 * half + 1] = joined[n][1];
    state.max[half] = max, state.sum[half] = sum;
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    mma_attention_kernel(const TreeAttentionParams p, const AttentionWorkspace space,
                         const MmaOptions options) {
  using Element = typename C::Element;
  constexpr int kTiles = C::kDim / 8 / C::kKeyWarps;  // of a row that a warp writes
  unsigned char* const shared = dynamic_shared();
  // Kept in shared memory: registers are for the products.
  SPECDEC_SHARED(AttentionUnit, u);
  if (threadIdx.x < 32) {
    const AttentionUnit unit = make_unit(p, C::kRows, C::kTileKeys, blockIdx.x % space.row_blocks,
                                         blockIdx.x / space.row_blocks, space.splits);
    if (threadIdx.x == 0) u = unit;
  }
  __syncthreads();
  if (u.split == 0) write_padding<Element>(p, u);
  if (u.split >= u.splits) return;

  const int warp = threadIdx.x / 32, row_warp = warp / C::kKeyWarps, key_warp = warp % C::kKeyWarps;
  const int first_row = row_warp * C::kWarpRows;
  MmaRows<C> rows;
  attend<C>(p, u, options, MmaTiles<C>(shared), first_row, key_warp * C::kWarpKeys, rows);
  if constexpr (C::kKeyWarps > 1)
    join_key_warps<C>(reinterpret_cast<float*>(shared), key_warp, rows.out[0], rows.state[0]);

  const GlobalParts<C::kRows, C::kDim> parts(p, u, space);
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
    const int row = first_row + tile * kFragmentRows;
    if (row >= u.live_rows) continue;
    if (u.splits == 1) {
      write_rows<Element, kTiles>(p, u, row, rows.out[tile], key_warp * kTiles, rows.state[tile]);
    } else {
      write_part<kTiles>(parts.of(u.split), row, rows.out[tile], key_warp * kTiles,
                         rows.state[tile]);
    }
  }
  if (u.splits == 1) return;
  if (is_last_split(parts.ticket, u.splits, reinterpret_cast<int*>(shared)))
    combine_parts<Element, C::kDim>(p, u, parts, warp, C::kThreads / 32);
}

}  // namespace specdec
