#include "rms_norm/rms_norm.h"

#include <cmath>

#include "common/element.h"
#include "common/vec.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

constexpr int64_t kSerialElements = 1 << 16;  // below these one thread is faster

template <class T>
float sum_of_squares(const T* x, int64_t dim) {
  constexpr int kSums = 4;
  F32 sums[kSums] = {};
  int64_t c = 0;
  for (; c + kSums * kLanes <= dim; c += kSums * kLanes)
    for (int i = 0; i < kSums; ++i) {
      const F32 value = load(x + c + i * kLanes);
      sums[i] = fma(value, value, sums[i]);
    }
  for (; c < dim; c += kLanes) {
    const int left = int(dim - c);
    const F32 value = left >= kLanes ? load(x + c) : load_partial(x + c, left, 0.0f);
    sums[0] = fma(value, value, sums[0]);
  }
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// The value that an element of type T holds for it.
SPECDEC_INLINE F32 rounded(F32 value, float) { return value; }
SPECDEC_INLINE F32 rounded(F32 value, BFloat16) {
  const U32 bits = bit_cast<U32>(value);
  const F32 nearest = bit_cast<F32>((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
  return select(value != value, value, nearest);
}
SPECDEC_INLINE F32 rounded(F32 value, Half) {
  Half stored[kLanes];
  store(stored, value);
  return load(stored);
}

template <class T>
void normalise(const RmsNormParams& p, int64_t row) {
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  const T* weight = static_cast<const T*>(p.weight);
  T* y = static_cast<T*>(p.y) + row * p.dim;
  const float factor = 1.0f / std::sqrt(sum_of_squares(x, p.dim) / float(p.dim) + p.eps);
  int64_t c = 0;
  for (; c + kLanes <= p.dim; c += kLanes)
    store(y + c, rounded(load(x + c) * factor, T()) * load(weight + c));
  for (; c < p.dim; ++c)
    y[c] = from_float<T>(to_float(from_float<T>(to_float(x[c]) * factor)) * to_float(weight[c]));
}

template <class T>
Status run(const RmsNormParams& p) {
#pragma omp parallel for num_threads(p.num_threads) if (p.rows * p.dim > kSerialElements)
  for (int64_t row = 0; row < p.rows; ++row) normalise<T>(p, row);
  return Status::ok;
}

}  // namespace

Status rms_norm(const RmsNormParams& p) {
  return with_element(p.dtype, [&](auto element) { return run<decltype(element)>(p); });
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
