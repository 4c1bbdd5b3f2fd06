#include "ngram_lookup/ngram_lookup.h"

#include "tensor.h"

namespace specdec {
namespace {

py::tuple ngram_lookup(const py::object& tokens, const py::object& lens, int64_t min_n,
                       int64_t max_n, int64_t k, int num_matches, bool latest, int num_threads) {
  const Tensor tokens_t = as_tensor(tokens), lens_t = as_tensor(lens);
  expect_cpu("ngram_lookup: tokens", tokens_t);
  expect_cpu("ngram_lookup: lens", lens_t);
  expect_dtype("ngram_lookup: tokens", tokens_t, {DType::i32});
  expect_shape("ngram_lookup: tokens", tokens_t, {-1, -1});
  expect_dense_rows("ngram_lookup: tokens", tokens_t);
  const int64_t batch = tokens_t.shape[0];
  expect_array("ngram_lookup: lens", lens_t, DType::i32, {batch});
  NewTensor drafts = new_tensor(DType::i64, {batch, num_matches, k});
  NewTensor num = new_tensor(DType::i32, {batch, num_matches});
  const NgramLookupParams params{tokens_t.as<int32_t>(),
                                 tokens_t.stride[0],
                                 lens_t.as<int32_t>(),
                                 batch,
                                 tokens_t.shape[1],
                                 min_n,
                                 max_n,
                                 k,
                                 num_matches,
                                 latest,
                                 drafts.view.as<int64_t>(),
                                 num.view.as<int32_t>(),
                                 num_threads};
  {
    py::gil_scoped_release release;
    raise_unless_ok("ngram_lookup", ngram_lookup_cpu(params));
  }
  return py::make_tuple(std::move(drafts.object), std::move(num.object));
}

}  // namespace

void bind_ngram_lookup(py::module_& m) { m.def("ngram_lookup", &ngram_lookup); }

}  // namespace specdec
