// The two products of attention for one warp: scores = Q K^T and out += weights V.
//
// A fragment is the part of a 16 x 8 result that mma.sync.m16n8k16 leaves with a lane: rows lane /
// 4 (values 0, 1) and lane / 4 + 8 (values 2, 3), columns lane % 4 * 2 and the next. 16-bit
// elements go through the tensor cores, fp32 through fused multiply-adds in the same layout, which
// keep all 24 bits.
#pragma once

#include "common/matrix.cuh"
#include "tree_attention/tiles.cuh"

namespace specdec {

constexpr int kFragmentRows = 16;
constexpr int kFragmentKeys = 8;  // columns of a fragment

struct Fragment {
  float values[4];
};

// ---- 16-bit elements

template <class Element, int kDim, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void multiply_keys_16(Fragment (&scores)[kRowTiles][kKeyTiles],
                                                 const Element* queries, int first_row,
                                                 const Element* keys, int first_key) {
  using Layout = TileLayout<Element, kDim>;
  static_assert(kKeyTiles % 2 == 0, "keys are read by the 16");
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t a[kRowTiles][4];  // rows 0-7 and 8-15 of elements 0-7, then of elements 8-15
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const int row = first_row + tile * kFragmentRows + lane % 16;
      ldmatrix_x4(a[tile], queries + Layout::chunk(row, 2 * step + lane / 16));
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      uint32_t b[4];  // keys 0-7: elements 0-7, 8-15, then keys 8-15
      const int row = first_key + n * kFragmentKeys + lane / 16 * 8 + lane % 8;
      ldmatrix_x4(b, keys + Layout::chunk(row, 2 * step + lane / 8 % 2));
      const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        mma_16816<Element>(scores[tile][n].values, a[tile], low);
        mma_16816<Element>(scores[tile][n + 1].values, a[tile], high);
      }
    }
  }
}

template <class Element, int kDim, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void multiply_values_16(Fragment (&out)[kRowTiles][kDim / 8],
                                                   const Fragment (&weights)[kRowTiles][kKeyTiles],
                                                   const Element* values, int first_key) {
  using Layout = TileLayout<Element, kDim>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kKeyTiles / 2; ++step) {
    uint32_t a[kRowTiles][4];  // a result's layout is that of an operand: two fragments make one
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = weights[tile][2 * step + i / 2].values + i % 2 * 2;
        a[tile][i] = pack_pair<Element>(pair[0], pair[1]);
      }
    const int row = first_key + step * 16 + lane % 16;
#pragma unroll
    for (int n = 0; n < kDim / 8; n += 2) {
      uint32_t b[4];  // columns 0-7: keys 0-7, 8-15, then columns 8-15
      ldmatrix_x4_transposed(b, values + Layout::chunk(row, n + lane / 16));
      const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        mma_16816<Element>(out[tile][n].values, a[tile], low);
        mma_16816<Element>(out[tile][n + 1].values, a[tile], high);
      }
    }
  }
}

// ---- fp32

__device__ __forceinline__ float add_products(float sum, const float4& a, const float4& b) {
  sum = fmaf(a.x, b.x, sum);
  sum = fmaf(a.y, b.y, sum);
  sum = fmaf(a.z, b.z, sum);
  return fmaf(a.w, b.w, sum);
}

template <int kDim>
__device__ __forceinline__ float4 four_of(const float* tile, int row, int chunk) {
  return *reinterpret_cast<const float4*>(tile + TileLayout<float, kDim>::chunk(row, chunk));
}

template <int kDim, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void multiply_keys_32(Fragment (&scores)[kRowTiles][kKeyTiles],
                                                 const float* queries, int first_row,
                                                 const float* keys, int first_key) {
  static_assert(kRowTiles == 1, "more rows would not fit into registers");
  const int lane = threadIdx.x % 32;
  const int row = first_row + lane / 4, key = first_key + lane % 4 * 2;
#pragma unroll 1
  for (int chunk = 0; chunk < kDim / 4; ++chunk) {
    const float4 q0 = four_of<kDim>(queries, row, chunk);
    const float4 q1 = four_of<kDim>(queries, row + 8, chunk);
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const float4 k0 = four_of<kDim>(keys, key + n * kFragmentKeys, chunk);
      const float4 k1 = four_of<kDim>(keys, key + n * kFragmentKeys + 1, chunk);
      float* sum = scores[0][n].values;
      sum[0] = add_products(sum[0], q0, k0);
      sum[1] = add_products(sum[1], q0, k1);
      sum[2] = add_products(sum[2], q1, k0);
      sum[3] = add_products(sum[3], q1, k1);
    }
  }
}

template <int kDim, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void multiply_values_32(Fragment (&out)[kRowTiles][kDim / 8],
                                                   const Fragment (&weights)[kRowTiles][kKeyTiles],
                                                   const float* values, int first_key) {
  static_assert(TileLayout<float, kDim>::kChunks % 8 == 0, "offsets below are those of 8 chunks");
  const int lane = threadIdx.x % 32;
  values += first_key * kDim + lane % 2 * 2;                       // first_key % 8 == 0
  const int side[2] = {lane / 2 % 2 * 4, (lane / 2 % 2 ^ 1) * 4};  // in even and in odd rows
#pragma unroll
  for (int key = 0; key < kKeyTiles * kFragmentKeys; ++key) {
    const float* held = weights[0][key / kFragmentKeys].values + key % 2;
    const int owner = lane / 4 * 4 + key % kFragmentKeys / 2;
    const float w0 = __shfl_sync(kAllLanes, held[0], owner);
    const float w1 = __shfl_sync(kAllLanes, held[2], owner);
    const float* row = values + side[key % 2];
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const float2 v = *reinterpret_cast<const float2*>(row + key * kDim + (2 * n ^ (key & 6)) * 4);
      float* sum = out[0][n].values;
      sum[0] = fmaf(w0, v.x, sum[0]);
      sum[1] = fmaf(w0, v.y, sum[1]);
      sum[2] = fmaf(w1, v.x, sum[2]);
      sum[3] = fmaf(w1, v.y, sum[3]);
    }
  }
}

// ---- either

// scores[tile of 16 rows][8 keys each] += Q K^T, rows from first_row on and keys from first_key on.
template <class Element, int kDim, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void multiply_keys(Fragment (&scores)[kRowTiles][kKeyTiles],
                                              const Element* queries, int first_row,
                                              const Element* keys, int first_key) {
  if constexpr (sizeof(Element) == 4) {
    multiply_keys_32<kDim>(scores, queries, first_row, keys, first_key);
  } else {
    multiply_keys_16<Element, kDim>(scores, queries, first_row, keys, first_key);
  }
}

// out[tile of 16 rows][8 columns each] += weights V, keys from first_key on.
template <class Element, int kDim, int kRowTiles, int kKeyTiles>
__device__ __forceinline__ void multiply_values(Fragment (&out)[kRowTiles][kDim / 8],
                                                const Fragment (&weights)[kRowTiles][kKeyTiles],
                                                const Element* values, int first_key) {
  if constexpr (sizeof(Element) == 4) {
    multiply_values_32<kDim>(out, weights, values, first_key);
  } else {
    multiply_values_16<Element, kDim>(out, weights, values, first_key);
  }
}

}  // namespace specdec
