// Reads the tensors that the sampling ops share into csrc/common/sampling.h's structs.
#pragma once

#include "common/sampling.h"
#include "tensor.h"

namespace specdec {

// window: draft_token_ids, parents, num_nodes, contiguous.
inline WindowArrays as_window(const char* op, const py::sequence& window) {
  const Tensor ids = as_tensor(window[0]), parents = as_tensor(window[1]);
  const Tensor num_nodes = as_tensor(window[2]);
  expect_dtype(op, ids, {DType::i64});
  expect_dtype(op, parents, {DType::i32});
  expect_dtype(op, num_nodes, {DType::i32});
  expect_shape(op, ids, {-1, -1});
  expect_shape(op, parents, {ids.shape[0], ids.shape[1]});
  expect_shape(op, num_nodes, {ids.shape[0]});
  for (const Tensor& tensor : {ids, parents, num_nodes}) expect_contiguous(op, tensor);
  return {ids.as<int64_t>(), parents.as<int32_t>(), num_nodes.as<int32_t>(), ids.shape[0],
          ids.shape[1]};
}

// outputs: path, num_accepted, output_token_ids, status, contiguous.
inline AcceptanceArrays as_acceptance(const char* op, const py::sequence& outputs,
                                      const WindowArrays& window) {
  const Tensor path = as_tensor(outputs[0]), count = as_tensor(outputs[1]);
  const Tensor tokens = as_tensor(outputs[2]), status = as_tensor(outputs[3]);
  expect_shape(op, path, {window.batch, window.width});
  expect_shape(op, tokens, {window.batch, window.width});
  expect_shape(op, count, {window.batch});
  expect_shape(op, status, {window.batch});
  for (const Tensor& tensor : {path, count, tokens, status}) expect_contiguous(op, tensor);
  return {path.as<int32_t>(), count.as<int32_t>(), tokens.as<int64_t>(), status.as<int32_t>()};
}

// fields: those of SamplingParams in order, contiguous; the optional ones may be None.
inline SamplingArrays as_sampling(const char* op, const py::sequence& fields, int64_t rows,
                                  int64_t width, int64_t vocab) {
  constexpr DType f32 = DType::f32, i32 = DType::i32, i64 = DType::i64;
  constexpr DType dtypes[14] = {f32, i32, f32, f32, i64, i64, i64,
                                i64, f32, i32, f32, f32, f32, i32};
  constexpr int kTokenIds = 7, kTokenCounts = 9, kAllowed = 13;
  Tensor t[14];
  for (int i = 0; i < 14; ++i) {
    t[i] = as_tensor(fields[i]);
    if (i >= kTokenIds && !t[i]) continue;
    expect_dtype(op, t[i], {dtypes[i]});
    expect_contiguous(op, t[i]);
    if (i == kAllowed) {
      const int64_t words = (vocab + 31) / 32;
      if (t[i].ndim == 2)
        expect_shape(op, t[i], {rows, words});
      else
        expect_shape(op, t[i], {rows, width, words});
    } else if (i >= kTokenIds && i <= kTokenCounts) {
      expect_shape(op, t[i], {rows, t[kTokenIds].shape[1]});
    } else {
      expect_shape(op, t[i], {rows});
    }
  }
  const EditArrays edits = {t[7].as<int64_t>(), t[8].as<float>(),   t[9].as<int32_t>(),
                            t[7].shape[1],      t[10].as<float>(),  t[11].as<float>(),
                            t[12].as<float>(),  t[13].as<int32_t>()};
  return {t[0].as<float>(),   t[1].as<int32_t>(), t[2].as<float>(),   t[3].as<float>(),
          t[4].as<int64_t>(), t[5].as<int64_t>(), t[6].as<int64_t>(), edits};
}

}  // namespace specdec
