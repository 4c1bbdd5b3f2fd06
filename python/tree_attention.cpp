#include "tree_attention/tree_attention.h"

#include "tensor.h"

namespace specdec {
namespace {

AttentionView view(const Tensor& t) {
  return {t.data, {t.stride[0], t.stride[1], t.stride[2], t.stride[3]}};
}

// Strides of (batch or page, head, slot), whichever way the cache is laid out.
AttentionView cache_view(const Tensor& t, bool paged) {
  if (paged) return {t.data, {t.stride[0], t.stride[2], t.stride[1], t.stride[3]}};
  return view(t);
}

AttentionView mask_view(const Tensor& t) {  // one mask for all rows when its batch is 1
  return {t.data, {t.shape[0] == 1 ? 0 : t.stride[0], t.stride[1], t.stride[2], 0}};
}

// Lengths live in memory the kernel trusts; a wrong one would read outside the cache.
void expect_lengths(const TreeAttentionParams& p, int64_t slots, int64_t pages) {
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

}  // namespace

void bind_tree_attention(py::module_& m) {
  m.def("tree_attention",
        [](const py::object& q, const py::object& k, const py::object& v,
           const py::object& prefix_len, const py::object& num_nodes, const py::object& tree_mask,
           const py::object& depth, const py::object& sinks, const py::object& block_table,
           const py::object& out, const py::object& lse, float scale, float softcap, int64_t window,
           int64_t split_size, int num_threads) {
          const Tensor q_t = as_tensor(q), k_t = as_tensor(k), v_t = as_tensor(v);
          const Tensor mask_t = as_tensor(tree_mask), table_t = as_tensor(block_table);
          const bool paged = bool(table_t);
          const int64_t page = paged ? k_t.shape[1] : 0;
          const TreeAttentionParams params{view(q_t),
                                           cache_view(k_t, paged),
                                           cache_view(v_t, paged),
                                           q_t.dtype,
                                           as_tensor(out).data,
                                           as_tensor(lse).as<float>(),
                                           q_t.shape[0],
                                           q_t.shape[1],
                                           q_t.shape[2],
                                           k_t.shape[paged ? 2 : 1],
                                           q_t.shape[3],
                                           v_t.shape[3],
                                           view(as_tensor(prefix_len)),
                                           view(as_tensor(num_nodes)),
                                           mask_view(mask_t),
                                           view(as_tensor(depth)),
                                           view(as_tensor(sinks)),
                                           view(table_t),
                                           mask_t.shape[2],
                                           page,
                                           scale,
                                           softcap,
                                           window,
                                           split_size,
                                           num_threads};
          expect_lengths(params, paged ? table_t.shape[1] * page : k_t.shape[2],
                         paged ? k_t.shape[0] : 0);
          py::gil_scoped_release release;
          raise_unless_ok("tree_attention", tree_attention_cpu(params));
        });
}

}  // namespace specdec
