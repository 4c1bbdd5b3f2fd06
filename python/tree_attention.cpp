#include "tree_attention.h"

namespace specdec {
namespace {

// Lengths live in memory the kernel trusts; a wrong one would read outside the cache.
void expect_lengths(const TreeAttentionParams& p) {
  const int64_t slots = p.cache_slots, pages = p.num_pages;
  const auto item = [](const AttentionView& v, int64_t i, int64_t j = 0) {
    return int64_t(static_cast<const int32_t*>(v.data)[i * v.stride[0] + j * v.stride[1]]);
  };
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t nodes = item(p.num_nodes, b);
    if (nodes < 0 || nodes > p.window_slots)
      throw py::value_error("tree_attention: expected num_nodes in 0..T, got " +
                            std::to_string(nodes) + " in row " + std::to_string(b));
    const int64_t prefix = nodes > 0 ? item(p.prefix_len, b) : 0, end = prefix + nodes;
    if (prefix < 0 || end > slots)
      throw py::value_error(
          "tree_attention: expected 0 <= prefix_len and prefix_len + num_nodes <= " +
          std::to_string(slots) + " slots, got prefix_len " + std::to_string(prefix) + " in row " +
          std::to_string(b));
    const int64_t begin = p.window > 0 && prefix >= p.window ? prefix - p.window + 1 : 0;
    for (int64_t i = begin / (pages ? p.page_size : 1); pages && i * p.page_size < end; ++i)
      if (item(p.block_table, b, i) < 0 || item(p.block_table, b, i) >= pages)
        throw py::value_error("tree_attention: expected pages of block_table in 0.." +
                              std::to_string(pages - 1) + ", got " +
                              std::to_string(item(p.block_table, b, i)));
  }
}

py::tuple tree_attention(const py::object& q, const py::object& k, const py::object& v,
                         const py::object& prefix_len, const py::object& num_nodes,
                         const py::object& tree_mask, const py::object& depth,
                         const py::object& sinks, const py::object& block_table, float scale,
                         float softcap, int64_t window, int64_t split_size, int num_threads) {
  const AttentionTensors t{as_tensor(q),          as_tensor(k),         as_tensor(v),
                           as_tensor(prefix_len), as_tensor(num_nodes), as_tensor(tree_mask),
                           as_tensor(depth),      as_tensor(sinks),     as_tensor(block_table)};
  for (const Tensor* tensor : {&t.q, &t.k, &t.v, &t.prefix_len, &t.num_nodes, &t.tree_mask,
                               &t.depth, &t.sinks, &t.block_table})
    expect_cpu("tree_attention", *tensor);
  expect_attention_tensors(t);
  TreeAttentionParams params = attention_params(t, scale, softcap, window, split_size);
  NewTensor out =
      new_tensor(t.q.dtype, {params.batch, params.window_slots, params.q_heads, params.v_dim});
  NewTensor lse = new_tensor(DType::f32, {params.batch, params.q_heads, params.window_slots});
  params.out = out.view.data;
  params.lse = lse.view.as<float>();
  params.num_threads = num_threads;
  expect_lengths(params);
  {
    py::gil_scoped_release release;
    raise_unless_ok("tree_attention", tree_attention_cpu(params));
  }
  return py::make_tuple(std::move(out.object), std::move(lse.object));
}

}  // namespace

void bind_tree_attention(py::module_& m) { m.def("tree_attention", &tree_attention); }

}  // namespace specdec
