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

void expect_views(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                  const Tensor& depth, const Tensor& sinks, const Tensor& table) {
  expect_dtype("tree_attention: q", q, {DType::f32, DType::bf16, DType::f16});
  expect_shape("tree_attention: q", q, {-1, -1, -1, -1});
  const int64_t batch = q.shape[0], slots = q.shape[1];
  const int64_t rows = table ? k.shape[0] : batch, second = k.shape[1], third = k.shape[2];
  expect_shape("tree_attention: k", k, {rows, -1, -1, q.shape[3]});
  expect_shape("tree_attention: v", v, {rows, second, third, -1});
  const int64_t kv_heads = table ? third : second;
  if (kv_heads == 0 || q.shape[2] % kv_heads != 0)
    throw py::value_error("tree_attention: expected Hkv to divide Hq");
  for (const Tensor* t : {&k, &v}) expect_dtype("tree_attention: k and v", *t, {q.dtype});
  for (const Tensor* t : {&q, &k, &v}) expect_dense_rows("tree_attention: q, k and v", *t);
  if (mask) {
    expect_dtype("tree_attention: tree_mask", mask, {DType::i64});
    expect_shape("tree_attention: tree_mask", mask, {mask.shape[0] == 1 ? 1 : batch, slots, -1});
    if (mask.shape[2] * 64 < slots)
      throw py::value_error("tree_attention: expected tree_mask with a bit for every slot");
  }
  if (depth) {
    expect_dtype("tree_attention: depth", depth, {DType::i32});
    expect_shape("tree_attention: depth", depth, {batch, slots});
  }
  if (sinks) {
    expect_dtype("tree_attention: sinks", sinks, {DType::f32});
    expect_shape("tree_attention: sinks", sinks, {q.shape[2]});
  }
  if (table) {
    expect_dtype("tree_attention: block_table", table, {DType::i32});
    expect_shape("tree_attention: block_table", table, {batch, -1});
  }
}

py::tuple tree_attention(const py::object& q, const py::object& k, const py::object& v,
                         const py::object& prefix_len, const py::object& num_nodes,
                         const py::object& tree_mask, const py::object& depth,
                         const py::object& sinks, const py::object& block_table, float scale,
                         float softcap, int64_t window, int64_t split_size, int num_threads) {
  const Tensor q_t = as_tensor(q), k_t = as_tensor(k), v_t = as_tensor(v);
  const Tensor prefix_t = as_tensor(prefix_len), nodes_t = as_tensor(num_nodes);
  const Tensor mask_t = as_tensor(tree_mask), depth_t = as_tensor(depth);
  const Tensor sinks_t = as_tensor(sinks), table_t = as_tensor(block_table);
  for (const Tensor* t :
       {&q_t, &k_t, &v_t, &prefix_t, &nodes_t, &mask_t, &depth_t, &sinks_t, &table_t})
    expect_cpu("tree_attention", *t);
  expect_views(q_t, k_t, v_t, mask_t, depth_t, sinks_t, table_t);
  const bool paged = bool(table_t);
  const int64_t batch = q_t.shape[0], slots = q_t.shape[1], heads = q_t.shape[2];
  const int64_t page = paged ? k_t.shape[1] : 0;
  for (const Tensor* t : {&prefix_t, &nodes_t}) {
    expect_dtype("tree_attention: prefix_len and num_nodes", *t, {DType::i32});
    expect_shape("tree_attention: prefix_len and num_nodes", *t, {batch});
  }
  if (window > 0 && mask_t && !depth_t)
    throw py::value_error("tree_attention: expected depth with tree_mask and window");
  NewTensor out = new_tensor(q_t.dtype, {batch, slots, heads, v_t.shape[3]});
  NewTensor lse = new_tensor(DType::f32, {batch, heads, slots});
  const TreeAttentionParams params{view(q_t),
                                   cache_view(k_t, paged),
                                   cache_view(v_t, paged),
                                   q_t.dtype,
                                   out.view.data,
                                   lse.view.as<float>(),
                                   batch,
                                   slots,
                                   heads,
                                   k_t.shape[paged ? 2 : 1],
                                   q_t.shape[3],
                                   v_t.shape[3],
                                   view(prefix_t),
                                   view(nodes_t),
                                   mask_view(mask_t),
                                   view(depth_t),
                                   view(sinks_t),
                                   view(table_t),
                                   mask_t.shape[2],
                                   page,
                                   scale,
                                   softcap,
                                   window,
                                   split_size,
                                   num_threads};
  expect_lengths(params, paged ? table_t.shape[1] * page : k_t.shape[2], paged ? k_t.shape[0] : 0);
  {
    py::gil_scoped_release release;
    raise_unless_ok("tree_attention", tree_attention_cpu(params));
  }
  return py::make_tuple(std::move(out.object), std::move(lse.object));
}

}  // namespace

void bind_tree_attention(py::module_& m) { m.def("tree_attention", &tree_attention); }

}  // namespace specdec
