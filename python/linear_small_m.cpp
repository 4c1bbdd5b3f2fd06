#include "linear_small_m/linear_small_m.h"

#include "tensor.h"

namespace specdec {
namespace {

py::object linear_small_m(const py::object& x, const py::object& weight, const py::object& bias,
                          int num_threads) {
  const Tensor x_t = as_tensor(x), weight_t = as_tensor(weight), bias_t = as_tensor(bias);
  expect_shape("linear_small_m: weight", weight_t, {-1, -1});
  const int64_t columns = weight_t.shape[0], depth = weight_t.shape[1];
  const Rows rows = rows_of("linear_small_m: x", x_t);
  if (rows.length != depth)
    throw py::value_error("linear_small_m: x: expected a last dimension of " +
                          std::to_string(depth));
  expect_dtype("linear_small_m: x", x_t, {DType::f32, DType::bf16, DType::f16});
  expect_dtype("linear_small_m: weight", weight_t, {x_t.dtype});
  expect_cpu("linear_small_m: x", x_t);
  expect_cpu("linear_small_m: weight", weight_t);
  expect_dense_rows("linear_small_m: weight", weight_t);
  if (!bias.is_none()) {
    expect_cpu("linear_small_m: bias", bias_t);
    expect_array("linear_small_m: bias", bias_t, x_t.dtype, {columns});
  }
  int64_t shape[kMaxDims];
  std::copy(x_t.shape, x_t.shape + x_t.ndim - 1, shape);
  shape[x_t.ndim - 1] = columns;
  NewTensor y = new_tensor(x_t.dtype, shape, x_t.ndim);
  const LinearSmallMParams params{x_t.data,    rows.stride, weight_t.data, weight_t.stride[0],
                                  bias_t.data, y.view.data, rows.count,    columns,
                                  depth,       x_t.dtype,   num_threads};
  {
    py::gil_scoped_release release;
    raise_unless_ok("linear_small_m", linear_small_m_cpu(params));
  }
  return std::move(y.object);
}

}  // namespace

void bind_linear_small_m(py::module_& m) { m.def("linear_small_m", &linear_small_m); }

}  // namespace specdec
