// From the unnormalised result of a block to out and lse: at once when the row has one split, else
// through fp32 parts in the workspace, which the last block of the row to finish adds up in the
// order of the splits, so that the result doesn't depend on which block that is.
#pragma once

#include "tree_attention/online_softmax.cuh"

namespace specdec {

// The unnormalised result of one split.
template <int kRows, int kRowStride>
struct AttentionPart {
  static constexpr int kStride = kRowStride;
  static constexpr int64_t kFloats = kRows * (kStride + 2);
  float* out;  // [kRows, kStride]
  float* max;  // [kRows], in units of log 2
  float* sum;  // [kRows]
  __device__ explicit AttentionPart(float* memory)
      : out(memory), max(memory + kRows * kStride), sum(max + kRows) {}
};

// Parts for every (batch, KV head, row block, split); tickets: zeroed, one per (batch, KV head, row
// block).
struct AttentionWorkspace {
  float* parts;
  int32_t* tickets;
  int row_blocks;
  int splits;  // of the grid
};

// The parts of one block's rows. Other blocks wrote them: loads go past the first-level cache.
template <int kRows, int kDim>
struct GlobalParts {
  using Part = AttentionPart<kRows, kDim>;
  float* memory;
  int32_t* ticket;

  __device__ GlobalParts(const TreeAttentionParams& p, const AttentionUnit& u,
                         const AttentionWorkspace& space) {
    const int64_t task = (u.batch * p.kv_heads + u.kv_head) * space.row_blocks + u.row_block;
    memory = space.parts + task * space.splits * Part::kFloats;
    ticket = space.tickets + task;
  }
  __device__ Part of(int split) const { return Part(memory + split * Part::kFloats); }

  __device__ float max(int split, int row) const { return __ldcg(of(split).max + row); }
  __device__ float sum(int split, int row) const { return __ldcg(of(split).sum + row); }
  __device__ float4 four(int split, int row, int column) const {
    return __ldcg(reinterpret_cast<const float4*>(of(split).out + row * kDim + column));
  }
};

struct FinishedRow {
  float factor;  // of the unnormalised output
  float lse;
};

// With the sink of its head in the denominator.
__device__ inline FinishedRow finish_row(const TreeAttentionParams& p, int head, float max,
                                         float sum) {
  float weight = 1.0f;
  if (p.sinks.data != nullptr) {
    const float sink = at<float>(p.sinks, head) * kLog2E;
    const float old_max = max;
    max = fmaxf(max, sink);
    weight = exp2_approx(old_max - finite_base(max));
    sum = fmaf(sum, weight, exp2_approx(sink - finite_base(max)));
  }
  return {sum == 0.0f ? 0.0f : weight / sum, (max + log2f(sum)) * kLn2};
}

// Row `row` of the block in out; and its place in lse.
template <class Element>
__device__ Element* out_row(const TreeAttentionParams& p, const AttentionUnit& u, int row) {
  const int64_t slot = u.batch * p.window_slots + u.slot_of(row);
  return static_cast<Element*>(p.out) + (slot * p.q_heads + u.head_of(row)) * p.v_dim;
}
__device__ inline float* lse_of(const TreeAttentionParams& p, const AttentionUnit& u, int row) {
  return p.lse + (u.batch * p.q_heads + u.head_of(row)) * p.window_slots + u.slot_of(row);
}

// kCount neighbouring columns from `column` on, in one store where their row allows it.
template <class Element, int kCount>
__device__ __forceinline__ void store_columns(Element* row, int column, int dim,
                                              const float (&values)[kCount]) {
  struct alignas(sizeof(Element) * kCount) Columns {
    Element values[kCount];
  } columns;
#pragma unroll
  for (int i = 0; i < kCount; ++i) columns.values[i] = from_float<Element>(values[i]);
  if (dim % kCount == 0) {
    if (column < dim) *reinterpret_cast<Columns*>(row + column) = columns;
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (column + i < dim) row[column + i] = columns.values[i];
}

// Rows of slots that are padding, which are no one's result.
template <class Element>
__device__ void write_padding(const TreeAttentionParams& p, const AttentionUnit& u) {
  const int dim = static_cast<int>(p.v_dim), threads = blockDim.x;
  for (int row = u.live_rows; row < u.rows; ++row) {
    for (int i = threadIdx.x; i < dim; i += threads) out_row<Element>(p, u, row)[i] = Element{};
    if (threadIdx.x == 0) *lse_of(p, u, row) = -kInfinity;
  }
}

// The fragments [first, first + kTiles) of kDim / 8 of the 16 rows from first_row on, each row
// once: lanes of a quad hold the same max and sum.
template <class Element, int kTiles>
__device__ __forceinline__ void write_rows(const TreeAttentionParams& p, const AttentionUnit& u,
                                           int first_row, const Fragment* out, int first,
                                           const SoftmaxState& state) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + lane / 4 + 8 * half;
    if (row >= u.live_rows) continue;
    const FinishedRow finished = finish_row(p, u.head_of(row), state.max[half], state.sum[half]);
    Element* target = out_row<Element>(p, u, row);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float pair[2] = {out[n].values[2 * half] * finished.factor,
                             out[n].values[2 * half + 1] * finished.factor};
      store_columns(target, (first + n) * 8 + lane % 4 * 2, static_cast<int>(p.v_dim), pair);
    }
    if (first == 0 && lane % 4 == 0) *lse_of(p, u, row) = finished.lse;
  }
}

// The same into a part.
template <int kTiles, int kRows, int kStride>
__device__ __forceinline__ void write_part(const AttentionPart<kRows, kStride>& part, int first_row,
                                           const Fragment* out, int first,
                                           const SoftmaxState& state) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + lane / 4 + 8 * half;
    float* target = part.out + row * kStride + first * 8 + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      *reinterpret_cast<float2*>(target + n * 8) =
          make_float2(out[n].values[2 * half], out[n].values[2 * half + 1]);
    if (first == 0 && lane % 4 == 0) {
      part.max[row] = state.max[half];
      part.sum[row] = state.sum[half];
    }
  }
}

// Whether this block is the last of its rows' splits. `flag` is shared memory.
__device__ inline bool is_last_split(int32_t* ticket, int splits, int* flag) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *flag = atomicAdd(ticket, 1) == splits - 1;
  __syncthreads();
  const bool last = *flag;
  if (last) __threadfence();
  return last;
}

// A warp adds up the parts of one row after the other: `row`, row + step, ...
template <class Element, int kDim, class Parts>
__device__ void combine_parts(const TreeAttentionParams& p, const AttentionUnit& u,
                              const Parts& parts, int row, int step) {
  constexpr int kColumns = 4, kTurns = (kDim + 32 * kColumns - 1) / (32 * kColumns);
  const int lane = threadIdx.x % 32, dim = static_cast<int>(p.v_dim);
  for (; row < u.live_rows; row += step) {
    float max = -kInfinity, sum = 0.0f, out[kTurns][kColumns] = {};
    for (int split = 0; split < u.splits; ++split) max = fmaxf(max, parts.max(split, row));
#pragma unroll 4
    for (int split = 0; split < u.splits; ++split) {
      const float weight = exp2_approx(parts.max(split, row) - finite_base(max));
      sum = fmaf(parts.sum(split, row), weight, sum);
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int column = (turn * 32 + lane) * kColumns;
        if (column >= kDim) continue;
        const float4 value = parts.four(split, row, column);
        out[turn][0] = fmaf(value.x, weight, out[turn][0]);
        out[turn][1] = fmaf(value.y, weight, out[turn][1]);
        out[turn][2] = fmaf(value.z, weight, out[turn][2]);
        out[turn][3] = fmaf(value.w, weight, out[turn][3]);
      }
    }
    const FinishedRow finished = finish_row(p, u.head_of(row), max, sum);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
      for (float& value : out[turn]) value *= finished.factor;
      store_columns(out_row<Element>(p, u, row), (turn * 32 + lane) * kColumns, dim, out[turn]);
    }
    if (lane == 0) *lse_of(p, u, row) = finished.lse;
  }
}

}  // namespace specdec
