#include "linear_small_m/linear_small_m.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "linear_small_m/vectors.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// Threads get multiples of this many outputs, which are whole register blocks.
constexpr int64_t kUnit = 12;

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
    const int64_t units = (p.n + kUnit - 1) / kUnit;
    const int64_t n1 = units * (thread + 1) / threads * kUnit;
    enough_memory = multiply_columns<T>(p, units * thread / threads * kUnit, n1 < p.n ? n1 : p.n);
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
