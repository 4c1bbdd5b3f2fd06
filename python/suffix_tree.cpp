#include <pybind11/stl.h>

#include <algorithm>
#include <limits>

#include "suffix_tree/suffix_cache.h"
#include "tensor.h"

namespace specdec {
namespace {

Tensor token_array(const char* name, const py::object& tokens) {
  const Tensor t = as_tensor(tokens);
  expect_array(name, t, DType::i32, {-1});
  return t;
}

SuffixDraftOptions draft_options(int64_t max_tokens, double factor, double offset, double min_prob,
                                 bool tree, std::vector<int32_t> stop_tokens,
                                 std::vector<double> chances, double min_prob_beyond) {
  if (max_tokens < 0) throw py::value_error("suffix draft: expected max_tokens of at least 0");
  if (!(min_prob >= 0 && min_prob <= 1))
    throw py::value_error("suffix draft: expected min_prob from 0 to 1");
  if (!std::is_sorted(chances.begin(), chances.end()))
    throw py::value_error("suffix draft: expected ascending chances");
  return {max_tokens,         factor,         offset, min_prob, tree, std::move(stop_tokens),
          std::move(chances), min_prob_beyond};
}

py::tuple as_tuple(const SuffixDraft& draft) {
  return py::make_tuple(draft.tokens, draft.parents, draft.probs, draft.score, draft.match_length);
}

py::tuple tree_draft(const SuffixTree& tree, const py::object& context, int64_t max_tokens,
                     double factor, double offset, double min_prob, bool as_tree,
                     std::vector<int32_t> stop_tokens, std::vector<double> chances,
                     double min_prob_beyond) {
  const Tensor t = token_array("SuffixTree.draft: context", context);
  return as_tuple(tree.draft(t.as<int32_t>(), t.shape[0],
                             draft_options(max_tokens, factor, offset, min_prob, as_tree,
                                           stop_tokens, chances, min_prob_beyond)));
}

py::list batch_draft(const SuffixBatch& batch, int64_t max_tokens, double factor, double offset,
                     double min_prob, bool as_tree, std::vector<int32_t> stop_tokens,
                     std::vector<double> chances, double min_prob_beyond) {
  const SuffixDraftOptions options =
      draft_options(max_tokens, factor, offset, min_prob, as_tree, std::move(stop_tokens),
                    std::move(chances), min_prob_beyond);
  std::vector<SuffixDraft> drafts;
  {
    py::gil_scoped_release release;
    drafts = batch.draft(options);
  }
  py::list rows;
  for (const SuffixDraft& draft : drafts) rows.append(as_tuple(draft));
  return rows;
}

void follow(SuffixBatch& batch, const py::object& tokens, const py::object& lens) {
  const Tensor t = as_tensor(tokens), lens_t = as_tensor(lens);
  expect_cpu("SuffixBatch.follow: tokens", t);
  expect_dtype("SuffixBatch.follow: tokens", t, {DType::i32});
  expect_shape("SuffixBatch.follow: tokens", t, {batch.batch(), -1});
  expect_dense_rows("SuffixBatch.follow: tokens", t);
  expect_cpu("SuffixBatch.follow: lens", lens_t);
  expect_array("SuffixBatch.follow: lens", lens_t, DType::i32, {batch.batch()});
  py::gil_scoped_release release;
  batch.follow(t.as<int32_t>(), t.stride[0], lens_t.as<int32_t>(), t.shape[1]);
}

py::tuple texts(const SuffixCache& cache) {
  std::vector<int32_t> tokens;
  std::vector<int64_t> lengths;
  {
    py::gil_scoped_release release;
    cache.texts(tokens, lengths);
  }
  const auto bytes = [](const auto& values) {
    return py::bytes(reinterpret_cast<const char*>(values.data()),
                     values.size() * sizeof(values[0]));
  };
  return py::make_tuple(bytes(tokens), bytes(lengths));
}

void load(SuffixCache& cache, const py::bytes& tokens, const py::bytes& lengths) {
  const std::string_view t = tokens, n = lengths;
  std::vector<int32_t> ids(t.size() / sizeof(int32_t));
  std::vector<int64_t> sizes(n.size() / sizeof(int64_t));
  std::copy_n(t.data(), ids.size() * sizeof(int32_t), reinterpret_cast<char*>(ids.data()));
  std::copy_n(n.data(), sizes.size() * sizeof(int64_t), reinterpret_cast<char*>(sizes.data()));
  py::gil_scoped_release release;
  cache.load(ids.data(), int64_t(ids.size()), sizes.data(), int64_t(sizes.size()));
}

void bind_tree(py::module_& m) {
  py::class_<SuffixTree>(m, "SuffixTree", "Counts the n-grams of texts; not for several threads.")
      .def(py::init<int, bool>(), py::arg("max_depth"), py::arg("eager") = false)
      .def("open", &SuffixTree::open, "The number of a new text.")
      .def(
          "extend",
          [](SuffixTree& tree, uint32_t text, const py::object& tokens) {
            const Tensor t = token_array("SuffixTree.extend: tokens", tokens);
            tree.extend(text, t.as<int32_t>(), t.shape[0]);
          },
          py::arg("text"), py::arg("tokens"), "Appends int32 [N] to a text.")
      .def("close", &SuffixTree::close, py::arg("text"), "Nothing more will be appended.")
      .def("remove_oldest", &SuffixTree::remove_oldest)
      .def(
          "count",
          [](const SuffixTree& tree, const std::vector<int32_t>& ngram) {
            return tree.count(ngram.data(), int(ngram.size()));
          },
          py::arg("ngram"), "How often an n-gram occurs.")
      .def(
          "continuations",
          [](const SuffixTree& tree, const std::vector<int32_t>& ngram) {
            return tree.continuations(ngram.data(), int(ngram.size()));
          },
          py::arg("ngram"), "[(token, count)], in order; token -1 is the end of a text.")
      .def(
          "longest_match",
          [](const SuffixTree& tree, const std::vector<int32_t>& context) {
            return tree.longest_match(context.data(), int64_t(context.size()));
          },
          py::arg("context"))
      .def("draft", &tree_draft, py::arg("context"), py::arg("max_tokens"), py::arg("factor") = 1.0,
           py::arg("offset") = 0.0, py::arg("min_prob") = 0.1, py::arg("tree") = false,
           py::arg("stop_tokens") = std::vector<int32_t>(),
           py::arg("chances") = std::vector<double>(), py::arg("min_prob_beyond") = 2.0,
           "(tokens, parents, probs, score, match_length) of the best draft.")
      .def_property_readonly("num_texts", &SuffixTree::num_texts)
      .def_property_readonly("num_tokens", &SuffixTree::num_tokens)
      .def_property_readonly("bytes", &SuffixTree::bytes, "Memory that is held.");
}

}  // namespace

void bind_suffix_tree(py::module_& m) {
  bind_tree(m);
  py::class_<SuffixCache, std::shared_ptr<SuffixCache>>(
      m, "SuffixCache", "What requests have generated, the oldest of them leaving first.")
      .def(py::init<int, int64_t, int64_t>(), py::kw_only(), py::arg("max_depth"),
           py::arg("max_requests"), py::arg("max_tokens"))
      .def("clear", &SuffixCache::clear)
      .def("texts", &texts, "All texts, oldest first, as bytes of int32, and their int64 lengths.")
      .def("load", &load, py::arg("tokens"), py::arg("lengths"), "The reverse of texts().")
      .def_property_readonly("num_requests", &SuffixCache::num_requests)
      .def_property_readonly("num_tokens", &SuffixCache::num_tokens)
      .def_property_readonly("bytes", &SuffixCache::bytes, "Memory that is held.");
  py::class_<SuffixBatch>(m, "SuffixBatch", "The texts of a batch, and their part in a cache.")
      .def(py::init<int64_t, int, std::shared_ptr<SuffixCache>>(), py::arg("batch"), py::kw_only(),
           py::arg("max_depth"), py::arg("cache") = nullptr)
      .def("follow", &follow, py::arg("tokens"), py::arg("lens"),
           "Takes what is new in int32 [B, S]; a row that is empty, got shorter or has other last "
           "tokens starts afresh, with all but its last token as prompt.")
      .def("draft", &batch_draft, py::kw_only(), py::arg("max_tokens"), py::arg("factor") = 1.0,
           py::arg("offset") = 0.0, py::arg("min_prob") = 0.1, py::arg("tree") = false,
           py::arg("stop_tokens") = std::vector<int32_t>(),
           py::arg("chances") = std::vector<double>(), py::arg("min_prob_beyond") = 2.0,
           "Per row (tokens, parents, probs, score, match_length).")
      .def("end", &SuffixBatch::end, py::call_guard<py::gil_scoped_release>(),
           "Nothing more will follow.")
      .def_property_readonly("batch", &SuffixBatch::batch)
      .def_property_readonly("bytes", &SuffixBatch::bytes, "Memory of the rows' own trees.");
}

}  // namespace specdec
