// The outputs of one thread by register blocks: the path of every dtype and instruction set, but
// for bf16 where there are matrix tiles.
#pragma once

#include "common/scratch.h"
#include "linear_small_m/blocks.h"
#include "linear_small_m/linear_small_m.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

constexpr int64_t kMaxRows = 64;  // rows of x that share one pass over the weight
// Rows of x in a register block, as many as the 16 (AVX-512: 32) registers hold beside the weights:
// of several groups, and of one that is alone.
constexpr int64_t kGroup = kLanes == 16 ? 6 : 4;
constexpr int64_t kTallGroup = kLanes == 16 ? 9 : 4;
constexpr int64_t kRun = 16;       // outputs of one stream that are gathered before they are stored
constexpr int64_t kFewGroups = 4;  // whose x is read again for every row of a stream
constexpr int64_t kMaxDepth = 2;
constexpr int64_t kPanelBytes = 32768;  // of weights and
constexpr int64_t kGroupBytes = 28672;  // of x that stay in the caches next to the core
// How far ahead a stream of weights is asked for: more than memory's latency, less than a page.
// With few rows of x the hardware prefetchers keep up, and near requests disturb them least.
constexpr int64_t ahead_bytes(int64_t rows) { return kHasTiles ? 2048 : rows <= 4 ? 1024 : 3072; }

// How one thread goes about up to kMaxRows rows of x. The thread's part of the weight is read as
// `columns` long streams at once, which the hardware prefetchers reward. A few rows of x are one
// group, and every weight passes by once. More rows are several groups, and weights are taken in
// panels of `depth` rows of every stream that stay in the cache for all groups.
template <class T>
struct Plan {
  using Packed = typename Steps<T>::Packed;
  static constexpr int64_t kStep = Steps<T>::kStep;
  int64_t rows;
  int64_t groups;
  int64_t columns;      // rows of the weight in one register block
  int64_t steps;        // of the whole of k, the tail's included
  int64_t block_steps;  // of one stretch
  int64_t depth;

  Plan(int64_t rows, int64_t k) : rows(rows), depth(1) {
    groups = rows <= kTallGroup ? 1 : (rows + kGroup - 1) / kGroup;
    columns = columns_of(begin(1));
    steps = k == 0 ? 1 : (k + kStep - 1) / kStep;
    int64_t most = kGroupBytes / (begin(1) * kStep * int64_t(sizeof(Packed)));
    const int64_t step_bytes = columns * kStep * sizeof(T);
    if (groups > 1 && kPanelBytes / step_bytes < most) most = kPanelBytes / step_bytes;
    const int64_t stretches = (steps + most - 1) / most;
    block_steps = (steps + stretches - 1) / stretches;
    if (groups > kFewGroups) depth = kPanelBytes / (block_steps * step_bytes);
    if (depth > kMaxDepth) depth = kMaxDepth;
  }
  static int64_t columns_of(int64_t group_rows) {
    return kLanes < 16 || group_rows > kGroup ? 3 : 4;
  }
  int64_t begin(int64_t g) const { return (rows * g + groups - 1) / groups; }
};

template <class T>
struct Scratch {
  typename Steps<T>::Packed* x;  // [steps][...]: see pack
  float* saved;                  // [depth, rows, columns, kLanes]
  float* out;                    // [rows, columns * kRun]

  explicit Scratch(const Plan<T>& plan) {
    using Packed = typename Steps<T>::Packed;
    const int64_t outputs = plan.rows * plan.columns;
    x = static_cast<Packed*>(
        thread_scratch(0, plan.rows * plan.steps * Steps<T>::kStep * sizeof(Packed)));
    saved = static_cast<float*>(thread_scratch(1, plan.depth * outputs * sizeof(F32)));
    out = static_cast<float*>(thread_scratch(2, outputs * kRun * sizeof(float)));
  }
  explicit operator bool() const { return x != nullptr && saved != nullptr && out != nullptr; }
};

// x group by group, in the order in which blocks read it; zeros behind the end of k.
template <class T>
void pack(const T* x, int64_t stride, int64_t k, const Plan<T>& plan,
          typename Steps<T>::Packed* packed) {
  constexpr int64_t kStep = Steps<T>::kStep, kVector = kStep / Steps<T>::kParts;
  for (int64_t g = 0; g < plan.groups; ++g) {
    const int64_t begin = plan.begin(g), rows = plan.begin(g + 1) - begin;
    for (int64_t r = 0; r < rows; ++r) {
      const T* source = x + (begin + r) * stride;
      typename Steps<T>::Packed* target = packed + begin * plan.steps * kStep + r * kVector;
      int64_t at = 0;
      for (; at + kStep <= k; at += kStep, target += rows * kStep)
        Steps<T>::pack(source + at, target, rows * kVector);
      if (at == k && k > 0) continue;
      T padded[kStep] = {};
      if (at < k) std::memcpy(padded, source + at, (k - at) * sizeof(T));
      Steps<T>::pack(padded, target, rows * kVector);
    }
  }
}

template <class T>
using Block = void (*)(const typename Steps<T>::Packed* x, const T* w, int64_t stride,
                       const Stretch& k, const int64_t* ahead, const Target& target);

template <class T>
Block<T> find_block(int64_t rows) {
  static constexpr Block<T> kBlocks[] = {
#if defined(SPECDEC_ISA_avx512)
      block<T, 1, 4>, block<T, 2, 4>, block<T, 3, 4>, block<T, 4, 4>, block<T, 5, 4>,
      block<T, 6, 4>, block<T, 7, 3>, block<T, 8, 3>, block<T, 9, 3>,
#else
      block<T, 1, 3>,
      block<T, 2, 3>,
      block<T, 3, 3>,
      block<T, 4, 3>,
#endif
  };
  return kBlocks[rows - 1];
}

// Rows of the weight: `depth` register blocks, each of rows that lie `stride` apart, row by row.
template <class T>
struct Panel {
  const T* w;
  int64_t stride;  // in rows
  int64_t depth;
  int64_t ahead_bytes;
  float* out;
  int64_t out_stride;  // between outputs of one block
};

// The outputs of a panel for all rows of x; the weights that come next are asked for meanwhile,
// each group of rows taking its share.
template <class T>
void multiply_panel(const LinearSmallMParams& p, const Plan<T>& plan, const Scratch<T>& scratch,
                    const Panel<T>& panel) {
  constexpr int64_t kStep = Steps<T>::kStep;
  const int64_t whole = p.k / kStep, row_stride = plan.columns * kRun;
  for (int64_t step = 0; step < plan.steps; step += plan.block_steps) {
    const bool last = step + plan.block_steps >= plan.steps;
    const Stretch stretch{last ? whole - step : plan.block_steps, last ? p.k % kStep : 0, step == 0,
                          last};
    for (int64_t g = 0; g < plan.groups; ++g) {
      const int64_t begin = plan.begin(g), rows = plan.begin(g + 1) - begin;
      int64_t ahead[4];
      for (int64_t c = 0; c < plan.columns; ++c)
        ahead[c] = c * plan.groups / plan.columns == g ? panel.ahead_bytes : 0;
      const Block<T> multiply = find_block<T>(rows);
      for (int64_t d = 0; d < panel.depth; ++d) {
        const Target target{scratch.saved + (d * plan.rows + begin) * plan.columns * kLanes,
                            panel.out + begin * row_stride + d, row_stride, panel.out_stride};
        multiply(scratch.x + (begin * plan.steps + step * rows) * kStep,
                 panel.w + d * p.weight_stride + step * kStep, panel.stride * p.weight_stride,
                 stretch, ahead, target);
      }
    }
  }
}

// Rounds and stores outputs n and following of some rows, with the bias.
template <class T>
void store_outputs(const LinearSmallMParams& p, int64_t m0, int64_t rows, int64_t n, int64_t count,
                   const float* out, int64_t row_stride) {
  const T* bias = p.bias == nullptr ? nullptr : static_cast<const T*>(p.bias) + n;
  for (int64_t r = 0; r < rows; ++r, out += row_stride) {
    T* y = static_cast<T*>(p.y) + (m0 + r) * p.n + n;
    int64_t c = 0;
    for (; c + kLanes <= count; c += kLanes) {
      const F32 value = load(out + c);
      store(y + c, bias == nullptr ? value : value + load(bias + c));
    }
    for (; c < count; ++c)
      y[c] = from_float<T>(bias == nullptr ? out[c] : out[c] + to_float(bias[c]));
  }
}

// Stream s of the weight starts at row n0 + s * length.
template <class T>
void multiply_streams(const LinearSmallMParams& p, const Plan<T>& plan, const Scratch<T>& scratch,
                      int64_t m0, int64_t n0, int64_t length) {
  const T* weight = static_cast<const T*>(p.weight);
  const int64_t panel_bytes = plan.depth * p.weight_stride * int64_t(sizeof(T));
  const int64_t ahead = plan.groups == 1 ? ahead_bytes(plan.rows) : panel_bytes;
  for (int64_t at = 0; at < length; at += kRun) {
    const int64_t run = length - at < kRun ? length - at : kRun;
    for (int64_t i = 0; i < run; i += plan.depth)
      multiply_panel<T>(
          p, plan, scratch,
          {weight + (n0 + at + i) * p.weight_stride, length,
           run - i < plan.depth ? run - i : plan.depth, ahead, scratch.out + i, kRun});
    for (int64_t s = 0; s < plan.columns; ++s)
      store_outputs<T>(p, m0, plan.rows, n0 + s * length + at, run, scratch.out + s * kRun,
                       plan.columns * kRun);
  }
}

// y[:, n0:n1]. Returns false when memory runs out.
template <class T>
bool multiply_columns(const LinearSmallMParams& p, int64_t n0, int64_t n1) {
  for (int64_t m0 = 0; m0 < p.m; m0 += kMaxRows) {
    const Plan<T> plan(p.m - m0 < kMaxRows ? p.m - m0 : kMaxRows, p.k);
    const Scratch<T> scratch(plan);
    if (!scratch) return false;
    pack(static_cast<const T*>(p.x) + m0 * p.x_stride, p.x_stride, p.k, plan, scratch.x);
    const int64_t length = (n1 - n0) / plan.columns;
    multiply_streams<T>(p, plan, scratch, m0, n0, length);
    for (int64_t n = n0 + length * plan.columns; n < n1; ++n) {  // a block of one row, many times
      const T* w = static_cast<const T*>(p.weight) + n * p.weight_stride;
      multiply_panel<T>(p, plan, scratch, {w, 0, 1, 0, scratch.out, 0});
      store_outputs<T>(p, m0, plan.rows, n, 1, scratch.out, plan.columns * kRun);
    }
  }
  return true;
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
