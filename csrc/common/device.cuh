// Lets CUDA files use the headers that the CPU kernels are built from: numerics.h, philox.h,
// masses.h and top_keys.h, which give one spelling to what must be the same bits everywhere.
// common/target.h includes this file for them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#define SPECDEC_DEVICE
#define SPECDEC_ISA device
#define SPECDEC_INLINE __device__ __forceinline__
#if defined(SPECDEC_CUDA_EMULATED)
#define SPECDEC_UNROLL(count)
#else
#define SPECDEC_PRAGMA(text) _Pragma(#text)
#define SPECDEC_UNROLL(count) SPECDEC_PRAGMA(unroll count)
#endif

namespace specdec {
namespace SPECDEC_ISA {
namespace {

template <class To, class From>
SPECDEC_INLINE To bit_cast(const From& value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

}  // namespace
}  // namespace SPECDEC_ISA
}  // namespace specdec
