#include "rejection_sample/rejection_sample.h"

#include "common/decide.h"
#include "rejection_sample/token_rule.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

template <class T>
Status run_token_rule(const RejectionSampleParams& p) {
  int failed = 0;
#pragma omp parallel for num_threads(p.num_threads) schedule(dynamic) if (p.window.batch > 1) \
    reduction(+ : failed)
  for (int64_t b = 0; b < p.window.batch; ++b) failed += !TokenRule<T>(p, b).run();
  return failed ? Status::out_of_memory : Status::ok;
}

template <class T>
Status run(const RejectionSampleParams& p) {
  if (!p.coupled) return run_token_rule<T>(p);
  return verify<T>(p.target, p.target_stride_b, p.target_stride_t, p.vocab, p.window, &p.sampling,
                   p.acceptance, p.num_threads);
}

}  // namespace

Status rejection_sample(const RejectionSampleParams& p) {
  switch (p.target_dtype) {
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
