#include "rms_norm/rms_norm.h"

#include "tensor.h"

namespace specdec {
namespace {

py::object rms_norm(const py::object& x, const py::object& weight, float eps, int num_threads) {
  const Tensor x_t = as_tensor(x), weight_t = as_tensor(weight);
  expect_dtype("rms_norm: x", x_t, {DType::f32, DType::bf16, DType::f16});
  expect_cpu("rms_norm: x", x_t);
  expect_cpu("rms_norm: weight", weight_t);
  const Rows rows = rows_of("rms_norm: x", x_t);
  expect_array("rms_norm: weight", weight_t, x_t.dtype, {rows.length});
  NewTensor y = new_tensor(x_t.dtype, x_t.shape, x_t.ndim);
  const RmsNormParams params{x_t.data,    rows.stride, weight_t.data, y.view.data, rows.count,
                             rows.length, eps,         x_t.dtype,     num_threads};
  {
    py::gil_scoped_release release;
    raise_unless_ok("rms_norm", rms_norm_cpu(params));
  }
  return std::move(y.object);
}

}  // namespace

void bind_rms_norm(py::module_& m) { m.def("rms_norm", &rms_norm); }

}  // namespace specdec
