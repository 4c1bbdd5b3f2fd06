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
  static constexpr int kJoinFloats = AttentionPart<kFragmentRows, kJoinStride>::kFloats;
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

// The block's tiles in shared memory, and how they get there. Every load is one group of cp.async,
// also one behind the last tile, so that a number of groups tells which tiles have arrived.
template <class C>
struct MmaTiles {
  using Element = typename C::Element;
  static constexpr int kTile = C::kTileKeys * C::kDim;
  const TreeAttentionParams& p;
  const AttentionUnit& u;
  const MmaOptions& options;
  CacheRows<Element> key_rows, value_rows;
  Element* queries;
  Element* all_keys;    // [stages][kTile]
  Element* all_values;  // [stages][kTile]

  __device__ MmaTiles(const TreeAttentionParams& params, const AttentionUnit& unit,
                      const MmaOptions& how, unsigned char* shared)
      : p(params),
        u(unit),
        options(how),
        key_rows(params, unit, params.k),
        value_rows(params, unit, params.v),
        queries(reinterpret_cast<Element*>(shared)),
        all_keys(queries + C::kRows * C::kDim),
        all_values(all_keys + C::kStages * kTile) {}

  __device__ Element* keys(int tile) const { return all_keys + tile % C::kStages * kTile; }
  __device__ Element* values(int tile) const { return all_values + tile % C::kStages * kTile; }

  __device__ __forceinline__ void load_keys_of(int tile) const {
    if (tile < u.tile_end)
      load_keys<Element, C::kDim, C::kTileKeys, C::kThreads>(
          keys(tile), key_rows, u, tile * C::kTileKeys, static_cast<int>(p.dim),
          options.whole_keys);
    cp_async_commit();
  }
  __device__ __forceinline__ void load_values_of(int tile) const {
    if (tile < u.tile_end)
      load_keys<Element, C::kDim, C::kTileKeys, C::kThreads>(
          values(tile), value_rows, u, tile * C::kTileKeys, static_cast<int>(p.v_dim),
          options.whole_values);
    cp_async_commit();
  }
  // The queries, in one group with the first keys, and what the stages have room for.
  __device__ __forceinline__ void load_first() const {
    load_queries<Element, C::kDim, C::kRows, C::kThreads>(queries, p, u, options.whole_queries);
    load_keys_of(u.tile_begin);
    for (int stage = 1; stage < C::kStages; ++stage) {
      load_values_of(u.tile_begin + stage - 1);
      load_keys_of(u.tile_begin + stage);
    }
  }
};

// One warp's rows and what they have seen so far.
template <class C>
struct MmaRows {
  Fragment out[C::kRowTiles][C::kDim / 8] = {};
  SoftmaxState state[C::kRowTiles];
};

// The tiles of the unit, all threads.
template <class C>
__device__ __forceinline__ void attend(const MmaTiles<C>& tiles, int first_row, int key_of_warp,
                                       MmaRows<C>& rows) {
  using Element = typename C::Element;
  constexpr int kPending = 2 * (C::kStages - 1);  // groups after the one that is waited for
  const AttentionUnit& u = tiles.u;
  const ScoreScale scale(tiles.p);
  const bool has_rows = first_row < u.live_rows;
  tiles.load_first();
  for (int tile = u.tile_begin; tile < u.tile_end; ++tile) {
    const int first_key = tile * C::kTileKeys + key_of_warp;
    Fragment scores[C::kRowTiles][C::kKeyTiles] = {};
    cp_async_wait<kPending>();
    __syncthreads();
    tiles.load_values_of(tile + C::kStages - 1);
    if (has_rows) {
      multiply_keys<Element, C::kDim>(scores, tiles.queries, first_row, tiles.keys(tile),
                                      key_of_warp);
      weigh_tiles<Element>(tiles.p, u, scale, first_key, first_row, kFragmentRows, scores,
                           rows.state, rows.out);
    }
    cp_async_wait<kPending>();
    __syncthreads();
    tiles.load_keys_of(tile + C::kStages);
    if (has_rows)
      multiply_values<Element, C::kDim>(rows.out, scores, tiles.values(tile), key_of_warp);
  }
  cp_async_wait<0>();
#pragma unroll
  for (SoftmaxState& state : rows.state) state.join_lanes();
}

// The results of all key warps: [16, kJoinStride] output, [16] maxima and [16] sums of each.
template <class C>
using JoinPart = AttentionPart<kFragmentRows, C::kJoinStride>;

// This lane's columns of one row, of the kTiles fragments from `first` on.
template <class C, int kTiles>
__device__ __forceinline__ void join_row(float* shared, int row, int first, int half,
                                         Fragment (&out)[C::kDim / 8], SoftmaxState& state) {
  const auto part = [&](int warp) { return JoinPart<C>(shared + warp * JoinPart<C>::kFloats); };
  float max = -kInfinity, sum = 0.0f, joined[kTiles][2] = {};
  for (int warp = 0; warp < C::kKeyWarps; ++warp) max = fmaxf(max, part(warp).max[row]);
  for (int warp = 0; warp < C::kKeyWarps; ++warp) {
    const float weight = exp2_approx(part(warp).max[row] - finite_base(max));
    const float* columns = part(warp).out + row * C::kJoinStride + threadIdx.x % 4 * 2;
    sum = fmaf(part(warp).sum[row], weight, sum);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float2 pair = *reinterpret_cast<const float2*>(columns + (first + n) * 8);
      joined[n][0] = fmaf(pair.x, weight, joined[n][0]);
      joined[n][1] = fmaf(pair.y, weight, joined[n][1]);
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
    out[n].values[2 * half] = joined[n][0], out[n].values[2 * half + 1] = joined[n][1];
  state.max[half] = max, state.sum[half] = sum;
}

// The key warps' results become one: each gets its part of the columns, in the first fragments.
template <class C>
__device__ __forceinline__ void join_key_warps(float* shared, int key_warp,
                                               Fragment (&out)[C::kDim / 8], SoftmaxState& state) {
  constexpr int kTiles = C::kDim / 8 / C::kKeyWarps;
  const JoinPart<C> own(shared + key_warp * JoinPart<C>::kFloats);
  __syncthreads();  // the tiles are used up
  write_part<C::kDim / 8>(own, 0, out, 0, state);
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half)
    join_row<C, kTiles>(shared, threadIdx.x % 32 / 4 + 8 * half, key_warp * kTiles, half, out,
                        state);
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
  attend<C>(MmaTiles<C>(p, u, options, shared), first_row, key_warp * C::kWarpKeys, rows);
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
