// Queries, keys and values on their way into shared memory.
//
// A tile is rows of kDim elements in chunks of 16 bytes; chunks are swapped within their row so
// that eight neighbouring rows of one chunk, or of two neighbouring ones, lie in different banks.
// Rows that nobody sees, and columns beyond the head size, are filled with zeros: memory that was
// never written may hold NaN, and 0 * NaN would reach every row.
#pragma once

#include "common/async_copy.cuh"
#include "common/element.cuh"
#include "tree_attention/unit.cuh"

namespace specdec {

template <class Element, int kDim>
struct TileLayout {
  static constexpr int kChunkElements = 16 / sizeof(Element);
  static constexpr int kChunks = kDim / kChunkElements;
  static_assert(kChunks % 4 == 0, "the swizzle swaps four or eight chunks");

  // Element index of a chunk.
  __device__ static int chunk(int row, int chunk) {
    const int swapped = kChunks % 8 == 0 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
    return (row * kChunks + swapped) * kChunkElements;
  }
};

// Rows of one KV head's keys or values, dense or in pages.
template <class Element>
struct CacheRows {
  const Element* base;
  int64_t slot_stride;
  int64_t page_stride;
  const int32_t* table;  // nullptr without pages
  int64_t table_stride;
  uint32_t page_size;

  __device__ CacheRows(const TreeAttentionParams& p, const AttentionUnit& u,
                       const AttentionView& view)
      : base(static_cast<const Element*>(view.data) + u.kv_head * view.stride[1]),
        slot_stride(view.stride[2]),
        page_stride(view.stride[0]),
        table(nullptr),
        table_stride(p.block_table.stride[1]),
        page_size(static_cast<uint32_t>(p.page_size)) {
    if (p.block_table.data != nullptr) {
      table = &at<int32_t>(p.block_table, u.batch);
    } else {
      base += u.batch * page_stride;
    }
  }

  __device__ const Element* row(uint32_t key) const {
    if (table == nullptr) return base + key * slot_stride;
    const uint32_t page = key / page_size;  // 32 bits: 64-bit divisions are slow
    return base + table[page * table_stride] * page_stride + (key - page * page_size) * slot_stride;
  }
};

// Where every row starts at 16 bytes, whole chunks are copied without passing through registers.
__host__ __device__ inline bool copies_chunks(const AttentionView& view, int64_t dim,
                                              int64_t item_size) {
  const int64_t strides = view.stride[0] | view.stride[1] | view.stride[2] | dim;
  return (reinterpret_cast<int64_t>(view.data) | strides * item_size) % 16 == 0;
}

// Chunk `chunk` of a row of a tile; `source` is the row in memory, of `dim` elements. Takes part in
// the current group of cp.async where rows are whole chunks.
template <class Element, int kDim>
__device__ __forceinline__ void copy_chunk(Element* tile, int row, int chunk, const Element* source,
                                           bool valid, int dim) {
  using Layout = TileLayout<Element, kDim>;
  const int column = chunk * Layout::kChunkElements;
  valid = valid && column < dim;
  cp_async_16(tile + Layout::chunk(row, chunk), valid ? source + column : source, valid);
}
template <class Element, int kDim>
__device__ __forceinline__ void gather_chunk(Element* tile, int row, int chunk,
                                             const Element* source, bool valid, int dim) {
  using Layout = TileLayout<Element, kDim>;
  const int column = chunk * Layout::kChunkElements;
  Pack<Element> pack{};
#pragma unroll
  for (int i = 0; i < Layout::kChunkElements; ++i)
    if (valid && column + i < dim) pack.values[i] = source[column + i];
  *reinterpret_cast<Pack<Element>*>(tile + Layout::chunk(row, chunk)) = pack;
}

// All threads of the block copy kRows rows; find(row, valid) points to a row in memory.
template <class Element, int kDim, int kRows, int kThreads, class Find>
__device__ __forceinline__ void load_tile(Element* tile, int dim, bool whole, const Find& find) {
  constexpr int kChunks = TileLayout<Element, kDim>::kChunks, kAll = kRows * kChunks;
  if (whole) {
#pragma unroll 4
    for (int turn = 0; turn < (kAll + kThreads - 1) / kThreads; ++turn) {
      const int i = turn * kThreads + threadIdx.x;
      if (kAll % kThreads != 0 && i >= kAll) break;
      bool valid;
      const Element* source = find(i / kChunks, &valid);
      copy_chunk<Element, kDim>(tile, i / kChunks, i % kChunks, source, valid, dim);
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < kAll; i += kThreads) {
      bool valid;
      const Element* source = find(i / kChunks, &valid);
      gather_chunk<Element, kDim>(tile, i / kChunks, i % kChunks, source, valid, dim);
    }
  }
}

// kRows keys from first_key on.
template <class Element, int kDim, int kRows, int kThreads>
__device__ __forceinline__ void load_keys(Element* tile, const CacheRows<Element>& cache,
                                          const AttentionUnit& u, int first_key, int dim,
                                          bool whole) {
  load_tile<Element, kDim, kRows, kThreads>(tile, dim, whole, [&](int row, bool* valid) {
    const int key = first_key + row;
    *valid = key >= u.key_begin && key < u.key_end;
    return *valid ? cache.row(key) : cache.base;
  });
}

// The block's queries.
template <class Element, int kDim, int kRows, int kThreads>
__device__ __forceinline__ void load_queries(Element* tile, const TreeAttentionParams& p,
                                             const AttentionUnit& u, bool whole) {
  load_tile<Element, kDim, kRows, kThreads>(
      tile, static_cast<int>(p.dim), whole, [&](int row, bool* valid) {
        *valid = row < u.live_rows;
        return *valid ? &at<Element>(p.q, u.batch, u.slot_of(row), u.head_of(row))
                      : static_cast<const Element*>(p.q.data);
      });
}

}  // namespace specdec
