#include "ngram_lookup/ngram_lookup.h"

#include "cuda.h"

namespace specdec {

void bind_ngram_lookup_cuda(py::module_& m) {
  m.def("ngram_lookup_workspace", &ngram_lookup_workspace);
  m.def("ngram_lookup", [](const py::object& tokens, const py::object& lens, int64_t min_n,
                           int64_t max_n, int64_t k, int num_matches, bool latest,
                           const py::object& drafts, const py::object& num,
                           const py::object& workspace, int device, std::uintptr_t stream) {
    const Tensor tokens_t = as_tensor(tokens), lens_t = as_tensor(lens);
    const Tensor drafts_t = as_tensor(drafts), num_t = as_tensor(num);
    const Tensor words = as_tensor(workspace);
    expect_dtype("ngram_lookup: tokens", tokens_t, {DType::i32});
    expect_shape("ngram_lookup: tokens", tokens_t, {-1, -1});
    expect_dense_rows("ngram_lookup: tokens", tokens_t);
    const int64_t batch = tokens_t.shape[0], max_len = tokens_t.shape[1];
    expect_array("ngram_lookup: lens", lens_t, DType::i32, {batch});
    expect_array("ngram_lookup: draft_token_ids", drafts_t, DType::i64, {batch, num_matches, k});
    expect_array("ngram_lookup: num", num_t, DType::i32, {batch, num_matches});
    expect_array("ngram_lookup: workspace", words, DType::i64,
                 {ngram_lookup_workspace(batch, max_len, num_matches)});
    NgramLookupParams params{tokens_t.as<int32_t>(),
                             tokens_t.stride[0],
                             lens_t.as<int32_t>(),
                             batch,
                             max_len,
                             min_n,
                             max_n,
                             k,
                             num_matches,
                             latest,
                             drafts_t.as<int64_t>(),
                             num_t.as<int32_t>(),
                             0};
    py::gil_scoped_release release;
    raise_if_cuda_error("ngram_lookup",
                        ngram_lookup_cuda(params, words.data, cuda_launch(device, stream)));
  });
}

}  // namespace specdec
