#include "sample/sample.h"

#include "sampling.h"

namespace specdec {

void bind_sample(py::module_& m) {
  m.def("sample", [](const py::object& logits, const py::sequence& sampling, uint32_t stream,
                     const py::object& tokens, int num_threads) {
    const Tensor rows = as_tensor(logits), out = as_tensor(tokens);
    expect_shape("sample: logits", rows, {-1, -1});
    expect_dense_rows("sample: logits", rows);
    expect_shape("sample: tokens", out, {rows.shape[0]});
    const SampleParams params{
        rows.data,      rows.dtype,
        rows.stride[0], rows.shape[0],
        rows.shape[1],  as_sampling("sample", sampling, rows.shape[0], 1, rows.shape[1]),
        stream,         out.as<int64_t>(),
        num_threads};
    py::gil_scoped_release release;
    raise_unless_ok("sample", sample_cpu(params));
  });
}

}  // namespace specdec
