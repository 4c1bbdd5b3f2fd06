#include "linear_small_m/linear_small_m.h"

#include "tensor.h"

namespace specdec {

void bind_linear_small_m(py::module_& m) {
  m.def("linear_small_m", [](const py::object& x, const py::object& weight, const py::object& bias,
                             const py::object& y, int num_threads) {
    const Tensor x_t = as_tensor(x), weight_t = as_tensor(weight);
    const Tensor bias_t = as_tensor(bias), y_t = as_tensor(y);
    const int64_t rows = x_t.shape[0], columns = weight_t.shape[0], depth = weight_t.shape[1];
    expect_dtype("linear_small_m: weight", weight_t, {x_t.dtype});
    expect_dtype("linear_small_m: y", y_t, {x_t.dtype});
    expect_shape("linear_small_m: x", x_t, {rows, depth});
    expect_shape("linear_small_m: y", y_t, {rows, columns});
    expect_dense_rows("linear_small_m: x", x_t);
    expect_dense_rows("linear_small_m: weight", weight_t);
    expect_contiguous("linear_small_m: y", y_t);
    if (!bias.is_none()) {
      expect_dtype("linear_small_m: bias", bias_t, {x_t.dtype});
      expect_shape("linear_small_m: bias", bias_t, {columns});
      expect_contiguous("linear_small_m: bias", bias_t);
    }
    const LinearSmallMParams params{x_t.data,    x_t.stride[0], weight_t.data, weight_t.stride[0],
                                    bias_t.data, y_t.data,      rows,          columns,
                                    depth,       x_t.dtype,     num_threads};
    py::gil_scoped_release release;
    raise_unless_ok("linear_small_m", linear_small_m_cpu(params));
  });
}

}  // namespace specdec
