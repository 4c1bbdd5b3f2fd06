#include "linear_small_m/linear_small_m.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "common/element.h"
#include "linear_small_m/tiles.h"
#include "linear_small_m/vectors.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

typedef bool (*MultiplyColumns)(const LinearSmallMParams& p, int64_t n0, int64_t n1);

// Each thread takes a contiguous part of the weight: a multiple of `unit` rows.
Status run(const LinearSmallMParams& p, MultiplyColumns multiply, int64_t unit) {
  bool enough_memory = true;
#pragma omp parallel num_threads(p.num_threads) reduction(&& : enough_memory) if (p.n * p.k > 16384)
  {
#if defined(_OPENMP)
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
#else
    const int64_t thread = 0, threads = 1;
#endif
    const int64_t units = (p.n + unit - 1) / unit;
    const int64_t n1 = units * (thread + 1) / threads * unit;
    enough_memory = multiply(p, units * thread / threads * unit, n1 < p.n ? n1 : p.n);
  }
  return enough_memory ? Status::ok : Status::out_of_memory;
}

// Whole register blocks of every height.
constexpr int64_t kBlockUnit = 12;

}  // namespace

Status linear_small_m(const LinearSmallMParams& p) {
#if defined(SPECDEC_ISA_amx)
  if (p.dtype == DType::bf16) return run(p, multiply_columns_by_tiles, kTileSide);
#endif
  return with_element(p.dtype, [&](auto element) {
    return run(p, multiply_columns<decltype(element)>, kBlockUnit);
  });
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
