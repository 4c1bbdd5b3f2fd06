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
#if defined(SPECDEC_CUDA_EMULATED)
  return cuda_emulation::float_of_half(value.bits);
#else
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
#endif
}

// The nearest value of T, ties to even.
template <class T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline BFloat16 from_float<BFloat16>(float value) {
#if defined(SPECDEC_CUDA_EMULATED)
  return {cuda_emulation::bf16_of(value)};
#else
  BFloat16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
#endif
}
template <>
__device__ inline Half from_float<Half>(float value) {
#if defined(SPECDEC_CUDA_EMULATED)
  return {cuda_emulation::half_of(value)};
#else
  Half result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
#endif
}

// Two of T (BFloat16 or Half) in one register, `low` in the low half.
template <class T>
__device__ uint32_t pack_pair(float low, float high);
template <>
__device__ inline uint32_t pack_pair<BFloat16>(float low, float high) {
#if defined(SPECDEC_CUDA_EMULATED)
  return cuda_emulation::bf16_of(low) | uint32_t(cuda_emulation::bf16_of(high)) << 16;
#else
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
#endif
}
template <>
__device__ inline uint32_t pack_pair<Half>(float low, float high) {
#if defined(SPECDEC_CUDA_EMULATED)
  return cuda_emulation::half_of(low) | uint32_t(cuda_emulation::half_of(high)) << 16;
#else
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
#endif
}

// The larger one, NaN if either is.
__device__ inline float max_or_nan(float a, float b) {
#if defined(SPECDEC_CUDA_EMULATED)
  return a != a ? a : b != b ? b : a > b ? a : b;
#else
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#endif
}

// What one thread loads at once.
template <class T>
struct alignas(16) Pack {
  T values[16 / sizeof(T)];
};

// The one switch over element types: run(element), element a value of the type that dtype names.
template <class Run>
cudaError_t with_element(DType dtype, Run run) {
  switch (dtype) {
    case DType::f32:
      return run(float());
    case DType::bf16:
      return run(BFloat16());
    case DType::f16:
      return run(Half());
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace specdec
