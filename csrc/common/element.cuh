// Element types on the device: everything is computed in fp32.
#pragma once

#include <cuda_runtime.h>

#include "common/params.h"

namespace specdec {

constexpr float kInfinity = __builtin_inff();

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(BFloat16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}
__device__ inline float to_float(Half value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

// What one thread loads at once.
template <class T>
struct alignas(16) Pack {
  T values[16 / sizeof(T)];
};

}  // namespace specdec
