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

// params: temperature, top_k, top_p, min_p, seed, position, contiguous, one value per row.
inline SamplingArrays as_sampling(const char* op, const py::sequence& params, int64_t rows) {
  Tensor tensors[6];
  const DType dtypes[6] = {DType::f32, DType::i32, DType::f32, DType::f32, DType::i64, DType::i64};
  for (int i = 0; i < 6; ++i) {
    tensors[i] = as_tensor(params[i]);
    expect_dtype(op, tensors[i], {dtypes[i]});
    expect_shape(op, tensors[i], {rows});
    expect_contiguous(op, tensors[i]);
  }
  return {tensors[0].as<float>(), tensors[1].as<int32_t>(), tensors[2].as<float>(),
          tensors[3].as<float>(), tensors[4].as<int64_t>(), tensors[5].as<int64_t>()};
}

}  // namespace specdec
