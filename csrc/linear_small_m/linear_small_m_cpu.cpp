#include "linear_small_m/linear_small_m.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "common/scratch.h"
#include "common/vec.h"

#define UNROLL _Pragma("GCC unroll 16")

namespace specdec {
namespace SPECDEC_ISA {
namespace {

constexpr int64_t kStep = 2 * kLanes;  // elements of k per inner step: two vectors
constexpr int64_t kMaxRows = 64;       // rows of x that share one pass over the weight
constexpr int kGroup = 4;              // rows of x in one register block
constexpr int64_t kPanel = 12;         // weight rows that stay in the L1 cache for all row groups
constexpr int64_t kColumns = 4 * kPanel;  // outputs gathered before they are rounded and stored
constexpr int64_t kPanelBytes = 16384;
constexpr int64_t kGroupBytes = 20480;

// Weight rows per register block for a group of `rows`: accumulators, weights and one x vector fit
// the 16 (AVX-512: 32) registers.
constexpr int block_columns(int rows) {
  if (kLanes == 16) return rows == 2 ? 12 : 6;
  return rows <= 2 ? 6 : rows == 3 ? 4 : 3;
}

// The two vectors of one step, in an order that only has to be the same for x and weight: halves
// for fp32 and fp16, even and odd elements for bf16, where each then costs one instruction.
// Volatile: taken from the cache at each use, so that it occupies no register.
const volatile U32 kOddElements = U32{} + 0xffff0000u;

template <class T, int kPart>
SPECDEC_INLINE F32 part(const T* source) {
  return load(source + kPart * kLanes);
}
typedef I32 PairsUnaligned __attribute__((aligned(2), may_alias));  // a row may start anywhere
template <>
SPECDEC_INLINE F32 part<BFloat16, 0>(const BFloat16* source) {
  const I32 pairs = *(const PairsUnaligned*)source;
  return bit_cast<F32>(bit_cast<U32>(pairs) << 16);
}
template <>
SPECDEC_INLINE F32 part<BFloat16, 1>(const BFloat16* source) {
  const I32 pairs = *(const PairsUnaligned*)source;
  return bit_cast<F32>(bit_cast<U32>(pairs) & kOddElements);
}

typedef float F32x4 __attribute__((vector_size(16)));

// The lane sums of four vectors, each by the same tree.
SPECDEC_INLINE F32x4 quarter_sum(F32 value) {
  F32x4 parts[kLanes / 4];
  std::memcpy(parts, &value, sizeof(value));
  for (int half = kLanes / 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
  return parts[0];
}
SPECDEC_INLINE F32x4 lane_sums(F32 a, F32 b, F32 c, F32 d) {
  const F32x4 p = quarter_sum(a), q = quarter_sum(b), r = quarter_sum(c), s = quarter_sum(d);
  const F32x4 pq =
      __builtin_shufflevector(p, q, 0, 4, 1, 5) + __builtin_shufflevector(p, q, 2, 6, 3, 7);
  const F32x4 rs =
      __builtin_shufflevector(r, s, 0, 4, 1, 5) + __builtin_shufflevector(r, s, 2, 6, 3, 7);
  return __builtin_shufflevector(pq, rs, 0, 1, 4, 5) + __builtin_shufflevector(pq, rs, 2, 3, 6, 7);
}

// Asks for the next panel of weights while this one is being used, a few lines at a time.
struct Prefetch {
  const char* at = nullptr;
  const char* end = nullptr;
  int lines = 0;  // per kPrefetchSteps

  SPECDEC_INLINE void advance() {
    if (at >= end) return;
    for (int i = 0; i < lines; ++i) __builtin_prefetch(at + 64 * i, 0, 2);
    at += 64 * lines;
  }
};
constexpr int64_t kPrefetchSteps = 4;

// A stretch of k: `steps` whole steps, then `tail` more elements.
struct Stretch {
  int64_t steps;
  int64_t tail;
  bool first;  // accumulators start from zero
  bool last;   // outputs are complete afterwards
};

// Half a step. The shorter side of the block is held in registers, the longer one passes by.
template <int kPart, class T, int kRows, int kCols>
SPECDEC_INLINE void multiply(F32 (&sum)[kRows][kCols], const float* x, const T* w, int64_t stride) {
  if (kRows < kCols) {
    F32 values[kRows];
    UNROLL for (int r = 0; r < kRows; ++r) values[r] = load(x + (kPart * kRows + r) * kLanes);
    UNROLL for (int c = 0; c < kCols; ++c) {
      const F32 weight = part<T, kPart>(w + c * stride);
      UNROLL for (int r = 0; r < kRows; ++r) sum[r][c] = fma(weight, values[r], sum[r][c]);
    }
  } else {
    F32 weights[kCols];
    UNROLL for (int c = 0; c < kCols; ++c) weights[c] = part<T, kPart>(w + c * stride);
    UNROLL for (int r = 0; r < kRows; ++r) {
      const F32 value = load(x + (kPart * kRows + r) * kLanes);
      UNROLL for (int c = 0; c < kCols; ++c) sum[r][c] = fma(weights[c], value, sum[r][c]);
    }
  }
}

template <class T, int kRows, int kCols>
SPECDEC_INLINE void multiply_step(F32 (&sum)[kRows][kCols], const float* x, const T* w,
                                  int64_t stride) {
  multiply<0>(sum, x, w, stride);
  asm("" : "+r"(w));  // reading the weights again is cheaper than keeping them
  multiply<1>(sum, x, w, stride);
}

// One register block over one stretch of k. `saved` holds its accumulators between stretches.
template <class T, int kRows, int kCols>
__attribute__((noinline)) void block(const float* x, const T* w, int64_t stride, const Stretch& k,
                                     float* saved, float* out, Prefetch& prefetch) {
  F32 sum[kRows][kCols];
  UNROLL for (int r = 0; r < kRows; ++r) UNROLL for (int c = 0; c < kCols; ++c) sum[r][c] =
      k.first ? F32{} : load(saved + (r * kCols + c) * kLanes);
  int64_t steps = k.steps;
  while (steps > 0) {
    const int64_t some = steps < kPrefetchSteps ? steps : kPrefetchSteps;
    prefetch.advance();
#pragma GCC unroll 1
    for (int64_t i = 0; i < some; ++i) {
      multiply_step(sum, x, w, stride);
      x += kRows * kStep;
      w += kStep;
    }
    steps -= some;
  }
  if (k.tail > 0) {
    T padded[kCols * kStep] = {};
    for (int c = 0; c < kCols; ++c)
      std::memcpy(padded + c * kStep, w + c * stride, k.tail * sizeof(T));
    multiply_step(sum, x, padded, kStep);
  }
  if (!k.last) {
    UNROLL for (int r = 0; r < kRows; ++r) UNROLL for (int c = 0; c < kCols; ++c)
        store(saved + (r * kCols + c) * kLanes, sum[r][c]);
    return;
  }
  UNROLL for (int r = 0; r < kRows; ++r) UNROLL for (int c = 0; c < kCols; c += 4) {
    const F32x4 sums =
        lane_sums(sum[r][c], sum[r][c + 1 < kCols ? c + 1 : c], sum[r][c + 2 < kCols ? c + 2 : c],
                  sum[r][c + 3 < kCols ? c + 3 : c]);
    std::memcpy(out + r * kColumns + c, &sums, (kCols - c < 4 ? kCols - c : 4) * sizeof(float));
  }
}

// The blocks of one row group in one panel of `columns` weight rows.
template <class T, int kRows>
void group(const float* x, const T* w, int64_t stride, int64_t columns, const Stretch& k,
           float* saved, float* out, Prefetch& prefetch) {
  constexpr int kCols = block_columns(kRows);
  int64_t c = 0;
  for (; c + kCols <= columns; c += kCols)
    block<T, kRows, kCols>(x, w + c * stride, stride, k, saved + c * kRows * kLanes, out + c,
                           prefetch);
  for (; c < columns; ++c)
    block<T, kRows, 1>(x, w + c * stride, stride, k, saved + c * kRows * kLanes, out + c, prefetch);
}

template <class T>
void any_group(int rows, const float* x, const T* w, int64_t stride, int64_t columns,
               const Stretch& k, float* saved, float* out, Prefetch& prefetch) {
  switch (rows) {
    case 1:
      return group<T, 1>(x, w, stride, columns, k, saved, out, prefetch);
    case 2:
      return group<T, 2>(x, w, stride, columns, k, saved, out, prefetch);
    case 3:
      return group<T, 3>(x, w, stride, columns, k, saved, out, prefetch);
    default:
      return group<T, 4>(x, w, stride, columns, k, saved, out, prefetch);
  }
}

// How one thread goes about its columns for up to kMaxRows rows of x.
struct Plan {
  int64_t rows;
  int64_t groups;
  int64_t steps;        // of the whole of k, the tail's included
  int64_t block_steps;  // of one stretch

  Plan(int64_t rows, int64_t k, int64_t item_bytes) : rows(rows) {
    groups = (rows + kGroup - 1) / kGroup;
    steps = k == 0 ? 1 : (k + kStep - 1) / kStep;
    int64_t most = kGroupBytes / ((rows + groups - 1) / groups * kStep * 4);
    const int64_t in_panel = kPanelBytes / (kPanel * kStep * item_bytes);
    if (groups > 1 && in_panel < most) most = in_panel;
    const int64_t stretches = (steps + most - 1) / most;
    block_steps = (steps + stretches - 1) / stretches;
  }
  int64_t begin(int64_t g) const { return rows * g / groups; }
};

struct Scratch {
  float* x;      // [steps][...]: see pack
  float* saved;  // [rows, kPanel, kLanes]
  float* out;    // [rows, kColumns]
};

// x in fp32, group by group, in the order in which blocks read it; zeros behind the end of k.
template <class T>
void pack(const T* x, int64_t stride, int64_t k, const Plan& plan, float* packed) {
  for (int64_t g = 0; g < plan.groups; ++g) {
    const int64_t begin = plan.begin(g), rows = plan.begin(g + 1) - begin;
    for (int64_t r = 0; r < rows; ++r) {
      const T* source = x + (begin + r) * stride;
      float* target = packed + begin * plan.steps * kStep + r * kLanes;
      for (int64_t at = 0; at < k; at += kStep) {
        T padded[kStep] = {};
        const T* from = source + at;
        if (k - at < kStep) {
          std::memcpy(padded, from, (k - at) * sizeof(T));
          from = padded;
        }
        store(target, part<T, 0>(from));
        store(target + rows * kLanes, part<T, 1>(from));
        target += rows * kStep;
      }
    }
  }
}

template <class T>
void panel(const LinearSmallMParams& p, const Plan& plan, const Scratch& scratch, const T* w,
           int64_t columns, float* out, Prefetch prefetch) {
  const int64_t whole = p.k / kStep;
  const int64_t chunks = (plan.block_steps + kPrefetchSteps - 1) / kPrefetchSteps;
  const int64_t stretches = (plan.steps + plan.block_steps - 1) / plan.block_steps;
  const int64_t wide = block_columns(int(plan.begin(1)));
  const int64_t turns = chunks * stretches * plan.groups * ((columns + wide - 1) / wide);
  prefetch.lines = int(((prefetch.end - prefetch.at) / 64 + turns - 1) / turns);
  for (int64_t step = 0; step < plan.steps; step += plan.block_steps) {
    const bool last = step + plan.block_steps >= plan.steps;
    const Stretch stretch{last ? whole - step : plan.block_steps, last ? p.k % kStep : 0, step == 0,
                          last};
    for (int64_t g = 0; g < plan.groups; ++g) {
      const int64_t begin = plan.begin(g), rows = plan.begin(g + 1) - begin;
      any_group<T>(int(rows), scratch.x + (begin * plan.steps + step * rows) * kStep,
                   w + step * kStep, p.weight_stride, columns, stretch,
                   scratch.saved + begin * kPanel * kLanes, out + begin * kColumns, prefetch);
    }
  }
}

template <class T>
void write(const LinearSmallMParams& p, int64_t m0, int64_t rows, int64_t n, int64_t columns,
           const float* out) {
  const T* bias = p.bias == nullptr ? nullptr : static_cast<const T*>(p.bias) + n;
  for (int64_t r = 0; r < rows; ++r, out += kColumns) {
    T* y = static_cast<T*>(p.y) + (m0 + r) * p.n + n;
    int64_t c = 0;
    for (; c + kLanes <= columns; c += kLanes) {
      const F32 value = load(out + c);
      store(y + c, bias == nullptr ? value : value + load(bias + c));
    }
    for (; c < columns; ++c)
      y[c] = from_float<T>(bias == nullptr ? out[c] : out[c] + to_float(bias[c]));
  }
}

template <class T>
bool columns(const LinearSmallMParams& p, int64_t n0, int64_t n1) {
  const T* weight = static_cast<const T*>(p.weight);
  for (int64_t m0 = 0; m0 < p.m; m0 += kMaxRows) {
    const Plan plan(p.m - m0 < kMaxRows ? p.m - m0 : kMaxRows, p.k, sizeof(T));
    const Scratch scratch{
        static_cast<float*>(thread_scratch(0, plan.rows * plan.steps * kStep * sizeof(float))),
        static_cast<float*>(thread_scratch(1, plan.rows * kPanel * sizeof(F32))),
        static_cast<float*>(thread_scratch(2, plan.rows * kColumns * sizeof(float)))};
    if (scratch.x == nullptr || scratch.saved == nullptr || scratch.out == nullptr) return false;
    pack(static_cast<const T*>(p.x) + m0 * p.x_stride, p.x_stride, p.k, plan, scratch.x);
    for (int64_t n = n0; n < n1; n += kColumns) {
      const int64_t wide = n1 - n < kColumns ? n1 - n : kColumns;
      for (int64_t c = 0; c < wide; c += kPanel) {
        const int64_t narrow = wide - c < kPanel ? wide - c : kPanel;
        const T* w = weight + (n + c) * p.weight_stride;
        const int64_t ahead = n1 - n - c - narrow;
        Prefetch prefetch;
        prefetch.at = (const char*)(w + narrow * p.weight_stride);
        prefetch.end =
            (const char*)(w + (narrow + (ahead < kPanel ? ahead : kPanel)) * p.weight_stride);
        panel<T>(p, plan, scratch, w, narrow, scratch.out + c, prefetch);
      }
      write<T>(p, m0, plan.rows, n, wide, scratch.out);
    }
  }
  return true;
}

template <class T>
Status run(const LinearSmallMParams& p) {
  bool enough_memory = true;
#pragma omp parallel num_threads(p.num_threads) reduction(&& : enough_memory) if (p.n * p.k > 16384)
  {
#if defined(_OPENMP)
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
#else
    const int64_t thread = 0, threads = 1;
#endif
    const int64_t units = (p.n + kGroup - 1) / kGroup;
    const int64_t n1 = units * (thread + 1) / threads * kGroup;
    enough_memory = columns<T>(p, units * thread / threads * kGroup, n1 < p.n ? n1 : p.n);
  }
  return enough_memory ? Status::ok : Status::out_of_memory;
}

}  // namespace

Status linear_small_m(const LinearSmallMParams& p) {
  switch (p.dtype) {
    case DType::f32:
      return run<float>(p);
    case DType::bf16:
      return run<BFloat16>(p);
    case DType::f16:
      return run<Half>(p);
    default:
      return Status::unsupported_dtype;
  }
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
