#include "sample/sample.h"

#include "common/decide.h"

namespace specdec {
namespace SPECDEC_ISA {
namespace {

template <class Rows>
Status draw_rows(const SampleParams& p, const Rows& logits) {
  auto* rows =
      static_cast<Decision*>(thread_scratch(kNodeScratch, (size_t(p.rows) + 1) * sizeof(Decision)));
  if (rows == nullptr) return Status::out_of_memory;
  for (int64_t r = 0; r < p.rows; ++r) {
    rows[r].b = r;
    rows[r].slot = 0;
    rows[r].position = p.sampling.position[r];
  }
  const Status status = decide_rows(logits, p.sampling, p.stream, rows, p.rows, p.num_threads);
  if (status != Status::ok) return status;
  for (int64_t r = 0; r < p.rows; ++r) p.tokens[r] = rows[r].token;
  return Status::ok;
}

template <class T>
Status run(const SampleParams& p) {
  const PlainRows<T> rows(p.logits, p.stride, 0, p.vocab);
  if (!p.sampling.edits.any()) return draw_rows(p, rows);
  const WindowArrays roots = {nullptr, nullptr, nullptr, p.rows, 1};
  EditedRows<T> edited(rows, p.sampling.edits, roots);
  return edited.prepare() ? draw_rows(p, edited) : Status::out_of_memory;
}

}  // namespace

Status sample(const SampleParams& p) {
  return with_element(p.dtype, [&](auto element) { return run<decltype(element)>(p); });
}

}  // namespace SPECDEC_ISA
}  // namespace specdec
