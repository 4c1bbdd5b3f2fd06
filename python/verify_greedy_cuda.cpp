#include "verify_greedy/verify_greedy.h"

#include "cuda.h"
#include "sampling.h"

namespace specdec {

void bind_verify_greedy_cuda(py::module_& m) {
  m.def("verify_greedy", [](const py::object& logits, const py::sequence& window,
                            const py::sequence& outputs, const py::object& workspace, int device,
                            std::uintptr_t stream) {
    const Tensor rows = as_tensor(logits), words = as_tensor(workspace);
    VerifyGreedyParams params{};
    params.window = as_window("verify_greedy", window);
    params.acceptance = as_acceptance("verify_greedy", outputs, params.window);
    expect_shape("verify_greedy: logits", rows, {params.window.batch, params.window.width, -1});
    expect_dense_rows("verify_greedy: logits", rows);
    expect_dtype("verify_greedy: workspace", words, {DType::i64});
    expect_shape("verify_greedy: workspace", words,
                 {params.window.batch * (2 * params.window.width + 1)});
    params.logits = rows.data;
    params.dtype = rows.dtype;
    params.stride_b = rows.stride[0];
    params.stride_t = rows.stride[1];
    params.vocab = rows.shape[2];
    py::gil_scoped_release release;
    raise_if_cuda_error("verify_greedy",
                        verify_greedy_cuda(params, words.data, cuda_launch(device, stream)));
  });
}

}  // namespace specdec
