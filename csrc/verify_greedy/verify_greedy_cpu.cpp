#include "verify_greedy/verify_greedy.h"

#include "common/decide.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

template <class T>
Status run(const VerifyGreedyParams& p) {
  const PlainRows<T> rows(p.logits, p.stride_b, p.stride_t, p.vocab);
  return verify(rows, p.window, nullptr, p.acceptance, p.num_threads);
}

}  // namespace

Status verify_greedy(const VerifyGreedyParams& p) {
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
