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
  return with_element(p.dtype, [&](auto element) { return run<decltype(element)>(p); });
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
