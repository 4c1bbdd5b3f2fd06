#include "rejection_sample/rejection_sample.h"

#include "rejection_sample/block_rule.h"
#include "rejection_sample/recursive_rule.h"
#include "rejection_sample/typical_rule.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

// A rule that decides the rows of the batch one by one.
template <class OneRow, class Rows>
Status each_row(const RejectionSampleParams& p, const Rows& logits) {
  int failed = 0;
#pragma omp parallel for num_threads(p.num_threads) schedule(dynamic) if (p.window.batch > 1) \
    reduction(+ : failed)
  for (int64_t b = 0; b < p.window.batch; ++b) failed += !OneRow(p, logits, b).run();
  return failed ? Status::out_of_memory : Status::ok;
}

template <class Rows>
Status run_rule(const RejectionSampleParams& p, const Rows& logits) {
  switch (p.rule) {
    case Rule::coupled:
      return verify(logits, p.window, &p.sampling, p.acceptance, p.num_threads);
    case Rule::recursive:
      return each_row<RecursiveRule<Rows>>(p, logits);
    case Rule::block:
      return each_row<BlockRule<Rows>>(p, logits);
    case Rule::typical:
      return each_row<TypicalRule<Rows>>(p, logits);
  }
  return Status::unsupported_shape;
}

template <class T>
Status run(const RejectionSampleParams& p) {
  const PlainRows<T> rows(p.target, p.target_stride_b, p.target_stride_t, p.vocab);
  if (!p.sampling.edits.any()) return run_rule(p, rows);
  EditedRows<T> edited(rows, p.sampling.edits, p.window);
  return edited.prepare() ? run_rule(p, edited) : Status::out_of_memory;
}

}  // namespace

Status rejection_sample(const RejectionSampleParams& p) {
  return with_element(p.target_dtype, [&](auto element) { return run<decltype(element)>(p); });
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
