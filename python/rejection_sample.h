// Reads what both modules' rejection_sample take.
#pragma once

#include "rejection_sample/rejection_sample.h"
#include "sampling.h"

namespace specdec {

inline RejectionSampleParams as_rejection_sample(
    const py::object& target_logits, const py::sequence& window, const py::sequence& sampling,
    const py::object& draft_logits, const py::object& draft_vocab_map, int rule, float threshold,
    float alpha, const py::sequence& outputs) {
  const char* op = "rejection_sample";
  const Tensor target = as_tensor(target_logits), draft = as_tensor(draft_logits);
  const Tensor map = as_tensor(draft_vocab_map);
  const WindowArrays arrays = as_window(op, window);
  expect_shape(op, target, {arrays.batch, arrays.width, -1});
  expect_dense_rows(op, target);
  if (draft) expect_shape(op, draft, {arrays.batch, arrays.width, -1});
  if (draft) expect_dense_rows(op, draft);
  if (draft) expect_dtype(op, draft, {DType::f32, DType::bf16, DType::f16});
  if (map) expect_shape(op, map, {draft.shape[2]});
  return {target.data,
          target.dtype,
          target.stride[0],
          target.stride[1],
          target.shape[2],
          draft.data,
          draft.dtype,
          draft.stride[0],
          draft.stride[1],
          draft.shape[2],
          map.as<int64_t>(),
          arrays,
          as_sampling(op, sampling, arrays.batch, arrays.width, target.shape[2]),
          as_acceptance(op, outputs, arrays),
          static_cast<Rule>(rule),
          threshold,
          alpha,
          0};
}

}  // namespace specdec
