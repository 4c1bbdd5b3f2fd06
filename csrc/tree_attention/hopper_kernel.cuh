// The kernel for Hopper: one warp copies tiles with the tensor memory accelerator, one or two
// warpgroups multiply them with wgmma, and the splits of a row are one cluster, whose blocks read
// each other's results from shared memory: no workspace, no ticket.
//
// Which rows and keys, masks, softmax and epilogue are the functions of the kernel for Ampere.
#pragma once

#include "common/launch.cuh"
#include "tree_attention/epilogue.cuh"
#include "tree_attention/hopper_ptx.cuh"

namespace specdec {

constexpr int kBoxColumns = 64;  // 128 bytes
constexpr int kGroupRows = 64;   // of a product of a warpgroup
constexpr int kGroupThreads = 128;
constexpr int kHopperShared = 232448;  // bytes a block may have

// kGroups warpgroups take kRowTiles * 64 rows each and share every tile.
template <class Element_, int kDim_, int kGroups_, int kRowTiles_>
struct HopperConfig {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr int kBoxes = kDim / kBoxColumns;  // side by side in a tile
  static constexpr int kGroups = kGroups_;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kRows = kGroups * kRowTiles * kGroupRows;
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
  static constexpr int kTileKeys = 64;
  static constexpr int kQueryElements = kRows * kDim;
  static constexpr int kTileElements = kTileKeys * kDim;
  static constexpr int kTileBytes = kTileElements * sizeof(Element);
  static constexpr int kAlignment = 1024;    // of boxes; dynamic shared memory may lie between
  static constexpr int kBarrierBytes = 256;  // and of the unit
  static constexpr int kFreeBytes =
      kHopperShared - kAlignment - kBarrierBytes - kQueryElements * int(sizeof(Element));
  // Tiles of keys and of values under way together; more than 8 would bring nothing.
  static constexpr int kSlots = kFreeBytes / kTileBytes < 8 ? kFreeBytes / kTileBytes / 2 * 2 : 8;
  static constexpr int kSharedBytes =
      kAlignment + kBarrierBytes + kQueryElements * int(sizeof(Element)) + kSlots * kTileBytes;
  // Results for the cluster, in the memory of queries and tiles; rows start in different banks.
  using Part = AttentionPart<kRows, kDim + 8>;
  static_assert(kSlots >= 2 &&
                    2 * kSlots * int(sizeof(Barrier)) + int(sizeof(AttentionUnit)) <= kBarrierBytes,
                "barriers");
  static_assert(Part::kFloats * int(sizeof(float)) <=
                    kQueryElements * int(sizeof(Element)) + kSlots * kTileBytes,
                "a part must fit");
};

struct HopperMaps {
  TensorMap keys, values;  // [batch or pages, heads, slots, columns]
  int box_slots;           // of a copy: a tile of keys, or a page when that is less
};

template <class C>
struct HopperShared {
  using Element = typename C::Element;
  Element* queries;  // boxes of [kRows, 64]
  Element* tiles;    // [kSlots], keys and values in turns, boxes of [kTileKeys, 64]
  Barrier* full;     // [kSlots]
  Barrier* empty;    // [kSlots]
  AttentionUnit* unit;
  __device__ explicit HopperShared(unsigned char* memory) {
    memory += (C::kAlignment - shared_address(memory) % C::kAlignment) % C::kAlignment;
    queries = reinterpret_cast<Element*>(memory);
    tiles = queries + C::kQueryElements;
    full = reinterpret_cast<Barrier*>(tiles + C::kSlots * C::kTileElements);
    empty = full + C::kSlots;
    unit = reinterpret_cast<AttentionUnit*>(empty + C::kSlots);
  }
};

// Where a stream of tiles stands in the ring of slots.
template <int kSlots>
struct RingPlace {
  int slot = 0;
  unsigned parity = 0;
  __device__ void advance() {
    slot = slot + 1 == kSlots ? 0 : slot + 1;
    parity ^= slot == 0;
  }
};

// One thread: all tiles of the unit, keys before values.
template <class C>
__device__ void copy_tiles(const TreeAttentionParams& p, const AttentionUnit& u,
                           const HopperMaps& maps, const HopperShared<C>& shared) {
  const uint32_t page_size = static_cast<uint32_t>(p.page_size);
  const int32_t* table =
      p.block_table.data == nullptr ? nullptr : &at<int32_t>(p.block_table, u.batch);
  RingPlace<C::kSlots> place;
  for (int tile = u.tile_begin; tile < u.tile_end; ++tile) {
    for (const TensorMap* map : {&maps.keys, &maps.values}) {
      Barrier& full = shared.full[place.slot];
      shared.empty[place.slot].wait(place.parity ^ 1);
      full.expect(C::kTileBytes);
      typename C::Element* target = shared.tiles + place.slot * C::kTileElements;
      for (int row = 0; row < C::kTileKeys; row += maps.box_slots) {
        uint32_t slot = tile * C::kTileKeys + row;
        int page = static_cast<int>(u.batch);
        if (table != nullptr) {
          // A page that no row sees may have been freed; zeros arrive from outside the tensor.
          const bool seen = int(slot) + maps.box_slots > u.key_begin && int(slot) < u.key_end;
          page = seen ? table[slot / page_size * p.block_table.stride[1]] : -1;
          slot %= page_size;
        }
        for (int box = 0; box < C::kBoxes; ++box)
          copy_box(target + (box * C::kTileKeys + row) * kBoxColumns, map, full, box * kBoxColumns,
                   static_cast<int>(slot), u.kv_head, page);
      }
      place.advance();
    }
  }
}

// The threads of the multiplying warpgroups.
template <class C>
__device__ void copy_queries(const TreeAttentionParams& p, const AttentionUnit& u, bool whole,
                             typename C::Element* queries) {
  using Element = typename C::Element;
  for (int box = 0; box < C::kBoxes; ++box) {
    const int column = box * kBoxColumns;
    load_tile<Element, kBoxColumns, C::kRows, C::kGroups * kGroupThreads>(
        queries + column * C::kRows, static_cast<int>(p.dim) - column, whole,
        [&](int row, bool* valid) {
          *valid = row < u.live_rows && column < p.dim;
          return *valid ? &at<Element>(p.q, u.batch, u.slot_of(row), u.head_of(row)) + column
                        : static_cast<const Element*>(p.q.data);
        });
  }
  cp_async_commit();
  cp_async_wait<0>();
  publish_shared();
  named_barrier(1, C::kGroups * kGroupThreads);
}

// Values that nobody sees may be NaN, and 0 * NaN would reach every row. Every warpgroup does all
// of it for itself.
template <class C>
__device__ void clear_hidden_values(const AttentionUnit& u, int first_key, int group,
                                    typename C::Element* tile) {
  if (first_key >= u.key_begin && first_key + C::kTileKeys <= u.key_end) return;
  constexpr int kChunks = kBoxColumns * sizeof(typename C::Element) / 16;  // of a row of a box
  for (int i = threadIdx.x % kGroupThreads; i < C::kBoxes * C::kTileKeys * kChunks;
       i += kGroupThreads) {
    const int key = first_key + i / kChunks % C::kTileKeys;
    if (key < u.key_begin || key >= u.key_end)
      reinterpret_cast<uint4*>(tile)[i] = make_uint4(0, 0, 0, 0);
  }
  publish_shared();
  named_barrier(2 + group, kGroupThreads);
}

// The first of this warp's 16 rows in a row tile of its warpgroup.
template <class C>
__device__ __forceinline__ int row_of_warp(int group, int tile) {
  const int warp = threadIdx.x % kGroupThreads / 32;
  return (group * C::kRowTiles + tile) * kGroupRows + warp * kFragmentRows;
}

template <class C>
struct HopperRows {
  Fragment out[C::kRowTiles][C::kDim / 8] = {};
  SoftmaxState state[C::kRowTiles];
};

// Weights of a row tile as the left operand of four products over 16 keys each.
using Weights = uint32_t[4][4];

// One warpgroup: the weights of a tile of keys. One row tile after the other, as scores take many
// registers; meanwhile the products of the other warpgroup run.
template <class C, int kTile = 0>
__device__ __forceinline__ void weigh_keys(const TreeAttentionParams& p, const AttentionUnit& u,
                                           const ScoreScale& scale, int first_key, int group,
                                           const typename C::Element* queries,
                                           const typename C::Element* keys, HopperRows<C>& rows,
                                           Weights (&weights)[C::kRowTiles]) {
  using Element = typename C::Element;
  Fragment scores[1][8];
  pin(scores);
  begin_products();
  const int first_row = (group * C::kRowTiles + kTile) * kGroupRows;
  const uint64_t a = operand(queries + first_row * kBoxColumns, 16), b = operand(keys, 16);
#pragma unroll
  for (int step = 0; step < C::kDim / 16; ++step) {
    const int box = step / 4, column = step % 4 * 16;  // 32 bytes further in the swizzled rows
    multiply_shared<Element>(scores[0], further<Element>(a, box * C::kRows * kBoxColumns + column),
                             further<Element>(b, box * C::kTileKeys * kBoxColumns + column),
                             step > 0);
  }
  end_products();
  wait_for_products();
  pin(scores);
  weigh<Element>(p, u, scale, first_key, row_of_warp<C>(group, kTile), scores[0], rows.state[kTile],
                 rows.out[kTile]);
#pragma unroll
  for (int i = 0; i < 16; ++i) {  // a result's layout is that of an operand
    const float* pair = scores[0][i / 2].values + i % 2 * 2;
    weights[kTile][i / 4][i % 4] = pack_pair<Element>(pair[0], pair[1]);
  }
  if constexpr (kTile + 1 < C::kRowTiles)
    weigh_keys<C, kTile + 1>(p, u, scale, first_key, group, queries, keys, rows, weights);
}

// out += weights V.
template <class C>
__device__ __forceinline__ void add_values(const Weights (&weights)[C::kRowTiles],
                                           const typename C::Element* values,
                                           Fragment (&out)[C::kRowTiles][C::kDim / 8]) {
  using Element = typename C::Element;
  pin(out);
  begin_products();
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile)
#pragma unroll
    for (int step = 0; step < C::kTileKeys / 16; ++step)
#pragma unroll
      for (int box = 0; box < C::kBoxes; ++box)
        multiply_registers<Element>(out[tile] + box * 8, weights[tile][step],
                                    operand(values + (box * C::kTileKeys + step * 16) * kBoxColumns,
                                            C::kTileKeys * kBoxColumns * sizeof(Element)));
  end_products();
  wait_for_products();
  pin(out);
}

// One warpgroup: all tiles of the unit for its rows.
template <class C>
__device__ __forceinline__ void multiply_tiles(const TreeAttentionParams& p, const AttentionUnit& u,
                                               const HopperShared<C>& shared, int group,
                                               HopperRows<C>& rows) {
  const ScoreScale scale(p);
  const bool arrives = threadIdx.x % 32 == 0;
  RingPlace<C::kSlots> place;
  for (int tile = u.tile_begin; tile < u.tile_end; ++tile) {
    const int first_key = tile * C::kTileKeys;
    Weights weights[C::kRowTiles];
    shared.full[place.slot].wait(place.parity);
    weigh_keys<C>(p, u, scale, first_key, group, shared.queries,
                  shared.tiles + place.slot * C::kTileElements, rows, weights);
    if (arrives) shared.empty[place.slot].arrive();
    place.advance();
    typename C::Element* values = shared.tiles + place.slot * C::kTileElements;
    shared.full[place.slot].wait(place.parity);
    clear_hidden_values<C>(u, first_key, group, values);
    add_values<C>(weights, values, rows.out);
    if (arrives) shared.empty[place.slot].arrive();
    place.advance();
  }
#pragma unroll
  for (SoftmaxState& state : rows.state) state.join_lanes();
}

// The parts of a cluster's blocks; the block of rank r has split r.
template <class Part>
struct ClusterParts {
  Part own;
  __device__ float max(int split, int row) const {
    return read_remote(remote_address(own.max + row, split));
  }
  __device__ float sum(int split, int row) const {
    return read_remote(remote_address(own.sum + row, split));
  }
  __device__ float4 four(int split, int row, int column) const {
    constexpr int kStride = Part::kStride;
    return read_remote_four(remote_address(own.out + row * kStride + column, split));
  }
};

// Grid (splits * row blocks, KV heads, batch) in clusters of all splits of a row block.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    hopper_attention_kernel(const __grid_constant__ TreeAttentionParams p,
                            const __grid_constant__ HopperMaps maps, const int splits,
                            const bool whole_queries) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(SPECDEC_CUDA_EMULATED)
  using Element = typename C::Element;
  const HopperShared<C> shared(dynamic_shared());
  const int group = threadIdx.x / kGroupThreads;  // the last one copies
  const AttentionUnit unit =
      make_unit(p, C::kRows, C::kTileKeys, blockIdx.x / splits, blockIdx.x % splits, splits);
  if (unit.split == 0) write_padding<Element>(p, unit);
  if (unit.live_rows == 0) return;  // in all blocks of the cluster

  if (threadIdx.x == 0) {
    *shared.unit = unit;
    for (int slot = 0; slot < C::kSlots; ++slot) {
      shared.full[slot].init(1);
      shared.empty[slot].init(C::kGroups * kGroupThreads / 32);
    }
    publish_barriers();
  }
  __syncthreads();
  const AttentionUnit& u = *shared.unit;  // not in registers: those are for the products

  if (group == C::kGroups) {
    if constexpr (C::kGroups > 1) leave_registers<40>();
    if (threadIdx.x == C::kGroups * kGroupThreads) copy_tiles<C>(p, u, maps, shared);
    __syncwarp();
    block_barrier();
    cluster_barrier();
    cluster_barrier();
  } else {
    if constexpr (C::kGroups > 1) take_registers<232>();
    HopperRows<C> rows;
    if (u.split < u.splits) {
      copy_queries<C>(p, u, whole_queries, shared.queries);
      multiply_tiles<C>(p, u, shared, group, rows);
    }
    block_barrier();  // queries and tiles are used up
    const typename C::Part part(reinterpret_cast<float*>(shared.queries));
#pragma unroll
    for (int tile = 0; tile < C::kRowTiles; ++tile)
      write_part<C::kDim / 8>(part, row_of_warp<C>(group, tile), rows.out[tile], 0,
                              rows.state[tile]);
    cluster_barrier();
    constexpr int kWarps = C::kGroups * kGroupThreads / 32;
    combine_parts<Element, C::kDim>(p, u, ClusterParts<typename C::Part>{part},
                                    u.split * kWarps + static_cast<int>(threadIdx.x) / 32,
                                    splits * kWarps);
    cluster_barrier();  // the others have read this block's memory
  }
#endif
}

}  // namespace specdec
