// What the CPU and the CUDA binding of tree_attention share.
#pragma once

#include "tensor.h"
#include "tree_attention/tree_attention.h"

namespace specdec {

struct AttentionTensors {
  Tensor q, k, v, prefix_len, num_nodes;
  Tensor tree_mask, depth, sinks, block_table;  // may be empty

  bool paged() const { return bool(block_table); }
  int64_t kv_heads() const { return k.shape[paged() ? 2 : 1]; }
  int64_t page_size() const { return paged() ? k.shape[1] : 0; }
  // Keys that a row has room for.
  int64_t slots() const { return paged() ? block_table.shape[1] * k.shape[1] : k.shape[2]; }
};

inline AttentionView attention_view(const Tensor& t) {
  return {t.data, {t.stride[0], t.stride[1], t.stride[2], t.stride[3]}};
}

// Strides of (batch or page, head, slot), whichever way the cache is laid out.
inline AttentionView cache_view(const Tensor& t, bool paged) {
  if (paged) return {t.data, {t.stride[0], t.stride[2], t.stride[1], t.stride[3]}};
  return attention_view(t);
}

inline AttentionView mask_view(const Tensor& t) {  // one mask for all rows when its batch is 1
  return {t.data, {t.shape[0] == 1 ? 0 : t.stride[0], t.stride[1], t.stride[2], 0}};
}

inline void expect_attention_tensors(const AttentionTensors& t) {
  const Tensor &q = t.q, &k = t.k, &v = t.v, &mask = t.tree_mask, &depth = t.depth;
  const Tensor &sinks = t.sinks, &table = t.block_table;
  expect_dtype("tree_attention: q", q, {DType::f32, DType::bf16, DType::f16});
  expect_shape("tree_attention: q", q, {-1, -1, -1, -1});
  const int64_t batch = q.shape[0], slots = q.shape[1];
  const int64_t first = table ? k.shape[0] : batch, second = k.shape[1], third = k.shape[2];
  expect_shape("tree_attention: k", k, {first, -1, -1, q.shape[3]});
  expect_shape("tree_attention: v", v, {first, second, third, -1});
  const int64_t kv_heads = table ? third : second;
  if (kv_heads == 0 || q.shape[2] % kv_heads != 0)
    throw py::value_error("tree_attention: expected Hkv to divide Hq");
  for (const Tensor* rows : {&k, &v}) expect_dtype("tree_attention: k and v", *rows, {q.dtype});
  for (const Tensor* rows : {&q, &k, &v}) expect_dense_rows("tree_attention: q, k and v", *rows);
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
  for (const Tensor* lengths : {&t.prefix_len, &t.num_nodes}) {
    expect_dtype("tree_attention: prefix_len and num_nodes", *lengths, {DType::i32});
    expect_shape("tree_attention: prefix_len and num_nodes", *lengths, {batch});
  }
}

// All but the outputs; the tensors have been checked.
inline TreeAttentionParams attention_params(const AttentionTensors& t, float scale, float softcap,
                                            int64_t window, int64_t split_size) {
  if (window > 0 && t.tree_mask && !t.depth)
    throw py::value_error("tree_attention: expected depth with tree_mask and window");
  TreeAttentionParams params{};
  params.q = attention_view(t.q);
  params.k = cache_view(t.k, t.paged());
  params.v = cache_view(t.v, t.paged());
  params.dtype = t.q.dtype;
  params.batch = t.q.shape[0];
  params.window_slots = t.q.shape[1];
  params.q_heads = t.q.shape[2];
  params.kv_heads = t.kv_heads();
  params.dim = t.q.shape[3];
  params.v_dim = t.v.shape[3];
  params.prefix_len = attention_view(t.prefix_len);
  params.num_nodes = attention_view(t.num_nodes);
  params.tree_mask = mask_view(t.tree_mask);
  params.depth = attention_view(t.depth);
  params.sinks = attention_view(t.sinks);
  params.block_table = attention_view(t.block_table);
  params.mask_words = t.tree_mask.shape[2];
  params.page_size = t.page_size();
  params.cache_slots = t.slots();
  params.num_pages = t.paged() ? t.k.shape[0] : 0;
  params.scale = scale;
  params.softcap = softcap;
  params.window = window;
  params.split_size = split_size;
  return params;
}

}  // namespace specdec
