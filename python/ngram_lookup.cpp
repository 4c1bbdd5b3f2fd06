#include "ngram_lookup/ngram_lookup.h"

#include "tensor.h"

namespace specdec {

void bind_ngram_lookup(py::module_& m) {
  m.def("ngram_lookup",
        [](const py::object& tokens, const py::object& lens, int64_t min_n, int64_t max_n,
           int64_t k, int num_matches, bool latest, const py::object& draft_token_ids,
           const py::object& num, int num_threads) {
          const Tensor tokens_t = as_tensor(tokens), lens_t = as_tensor(lens);
          const Tensor draft_t = as_tensor(draft_token_ids), num_t = as_tensor(num);
          const int64_t batch = tokens_t.shape[0];
          expect_dtype("ngram_lookup: tokens", tokens_t, {DType::i32});
          expect_dense_rows("ngram_lookup: tokens", tokens_t);
          expect_shape("ngram_lookup: lens", lens_t, {batch});
          expect_shape("ngram_lookup: draft_token_ids", draft_t, {batch, num_matches, k});
          expect_contiguous("ngram_lookup: draft_token_ids", draft_t);
          expect_contiguous("ngram_lookup: num", num_t);
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
                                         draft_t.as<int64_t>(),
                                         num_t.as<int32_t>(),
                                         num_threads};
          py::gil_scoped_release release;
          raise_unless_ok("ngram_lookup", ngram_lookup_cpu(params));
        });
}

}  // namespace specdec
