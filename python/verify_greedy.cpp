#include "verify_greedy/verify_greedy.h"

#include "sampling.h"

namespace specdec {

void bind_verify_greedy(py::module_& m) {
  m.def("verify_greedy", [](const py::object& logits, const py::sequence& window,
                            const py::sequence& outputs, int num_threads) {
    const Tensor rows = as_tensor(logits);
    const WindowArrays arrays = as_window("verify_greedy", window);
    expect_shape("verify_greedy: logits", rows, {arrays.batch, arrays.width, -1});
    expect_dense_rows("verify_greedy: logits", rows);
    const VerifyGreedyParams params{rows.data,
                                    rows.dtype,
                                    rows.stride[0],
                                    rows.stride[1],
                                    rows.shape[2],
                                    arrays,
                                    as_acceptance("verify_greedy", outputs, arrays),
                                    num_threads};
    py::gil_scoped_release release;
    raise_unless_ok("verify_greedy", verify_greedy_cpu(params));
  });
}

}  // namespace specdec
