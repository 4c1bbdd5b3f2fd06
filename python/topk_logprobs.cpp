#include "topk_logprobs/topk_logprobs.h"

#include "tensor.h"

namespace specdec {

void bind_topk_logprobs(py::module_& m) {
  m.def("topk_logprobs", [](const py::object& logits, int64_t k, const py::object& logprobs,
                            const py::object& token_ids, const py::object& lse, int num_threads) {
    const Tensor rows = as_tensor(logits), logprobs_t = as_tensor(logprobs);
    const Tensor ids_t = as_tensor(token_ids), lse_t = as_tensor(lse);
    expect_shape("topk_logprobs: logits", rows, {-1, -1});
    expect_dense_rows("topk_logprobs: logits", rows);
    expect_shape("topk_logprobs: logprobs", logprobs_t, {rows.shape[0], k});
    expect_shape("topk_logprobs: token_ids", ids_t, {rows.shape[0], k});
    expect_shape("topk_logprobs: lse", lse_t, {rows.shape[0]});
    const TopkLogprobsParams params{
        rows.data,         rows.dtype, rows.stride[0],         rows.shape[0],
        rows.shape[1],     k,          logprobs_t.as<float>(), ids_t.as<int64_t>(),
        lse_t.as<float>(), num_threads};
    py::gil_scoped_release release;
    raise_unless_ok("topk_logprobs", topk_logprobs_cpu(params));
  });
}

}  // namespace specdec
