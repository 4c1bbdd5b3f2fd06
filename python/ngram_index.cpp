#include "ngram_index/ngram_index.h"

#include <pybind11/stl.h>

#include "tensor.h"

namespace specdec {
namespace {

void extend(NgramIndex& index, int64_t row, const py::object& tokens) {
  const Tensor t = as_tensor(tokens);
  expect_dtype("NgramIndex.extend: tokens", t, {DType::i32});
  expect_shape("NgramIndex.extend: tokens", t, {-1});
  expect_contiguous("NgramIndex.extend: tokens", t);
  py::gil_scoped_release release;
  index.extend(row, t.as<int32_t>(), t.shape[0]);
}

void follow(NgramIndex& index, const py::object& tokens, const py::object& lens, int num_threads) {
  const Tensor t = as_tensor(tokens), lens_t = as_tensor(lens);
  expect_dtype("NgramIndex.follow: tokens", t, {DType::i32});
  expect_shape("NgramIndex.follow: tokens", t, {index.batch(), -1});
  expect_dense_rows("NgramIndex.follow: tokens", t);
  expect_dtype("NgramIndex.follow: lens", lens_t, {DType::i32});
  expect_shape("NgramIndex.follow: lens", lens_t, {index.batch()});
  expect_contiguous("NgramIndex.follow: lens", lens_t);
  py::gil_scoped_release release;
  index.follow(t.as<int32_t>(), t.stride[0], lens_t.as<int32_t>(), t.shape[1], num_threads);
}

py::tuple lookup(const NgramIndex& index) {
  std::vector<NgramDrafts> rows;
  {
    py::gil_scoped_release release;
    rows = index.lookup();
  }
  py::list drafts, lengths;
  for (const NgramDrafts& row : rows) {
    drafts.append(row.drafts);
    lengths.append(row.length);
  }
  return py::make_tuple(drafts, lengths);
}

}  // namespace

void bind_ngram_index(py::module_& m) {
  py::class_<NgramIndex>(m, "NgramIndex",
                         "Growing texts, one per row, that answer ngram_lookup without being read.")
      .def(
          py::init([](int64_t batch, int64_t min_n, int64_t max_n, int64_t k, int64_t num_matches) {
            return new NgramIndex(batch, {min_n, max_n, k, num_matches});
          }),
          py::arg("batch"), py::kw_only(), py::arg("min_n"), py::arg("max_n"), py::arg("k"),
          py::arg("num_matches") = 1)
      .def("extend", &extend, py::arg("row"), py::arg("tokens"), "Appends int32 [N] to a row.")
      .def("follow", &follow, py::arg("tokens"), py::arg("lens"), py::arg("num_threads") = 1,
           "Appends what is new in int32 [B, S]; a row that got shorter, or other last tokens than "
           "those appended, starts afresh.")
      .def("reset", &NgramIndex::reset, py::arg("row"), "Makes a row empty.")
      .def("lookup", &lookup,
           "(drafts, lengths): what ngram_lookup finds in each row, lists of k tokens, and the "
           "length of the longest match, 0 without one.")
      .def("size", &NgramIndex::size, py::arg("row"), "Tokens of a row.")
      .def_property_readonly("batch", &NgramIndex::batch)
      .def_property_readonly("bytes", &NgramIndex::bytes, "Memory that is held.");
  m.attr("NgramIndex").attr("MAX_N") = kMaxIndexedNgram;
}

}  // namespace specdec
