#include "sample/sample.h"

#include "cuda.h"
#include "sampling.h"

namespace specdec {

namespace {

SampleParams as_params(const py::object& logits, const py::sequence& sampling, uint32_t stream,
                       const py::object& tokens) {
  const Tensor rows = as_tensor(logits), out = as_tensor(tokens);
  expect_shape("sample: logits", rows, {-1, -1});
  expect_dense_rows("sample: logits", rows);
  expect_shape("sample: tokens", out, {rows.shape[0]});
  return {rows.data,
          rows.dtype,
          rows.stride[0],
          rows.shape[0],
          rows.shape[1],
          as_sampling("sample", sampling, rows.shape[0], 1, rows.shape[1]),
          stream,
          out.as<int64_t>(),
          0};
}

}  // namespace

void bind_sample_cuda(py::module_& m) {
  m.def("sample_workspace", [](const py::object& logits, const py::sequence& sampling,
                               uint32_t stream, const py::object& tokens) {
    return sample_cuda_workspace(as_params(logits, sampling, stream, tokens));
  });
  m.def("sample", [](const py::object& logits, const py::sequence& sampling, uint32_t stream,
                     const py::object& tokens, const py::object& workspace, int device,
                     std::uintptr_t queue) {
    const SampleParams params = as_params(logits, sampling, stream, tokens);
    const Tensor words = as_tensor(workspace);
    expect_array("sample: workspace", words, DType::i64, {sample_cuda_workspace(params)});
    py::gil_scoped_release release;
    raise_if_cuda_error("sample", sample_cuda(params, words.data, cuda_launch(device, queue)));
  });
}

}  // namespace specdec
