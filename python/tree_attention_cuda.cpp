#include "tree_attention.h"

#include "cuda.h"

namespace specdec {
namespace {

AttentionTensors as_attention_tensors(const py::sequence& inputs) {
  const auto t = as_tensors<9>(inputs);
  const AttentionTensors tensors{t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8]};
  expect_attention_tensors(tensors);
  return tensors;
}

TreeAttentionPlan make_plan(const TreeAttentionParams& params, bool hopper, int device) {
  TreeAttentionPlan plan{};
  raise_if_cuda_error("tree_attention", plan_tree_attention(params, device, hopper, &plan));
  return plan;
}

// Floats of workspace and zeroed tickets for these sizes.
py::tuple tree_attention_workspace(int64_t item_size, int64_t batch, int64_t window_slots,
                                   int64_t q_heads, int64_t kv_heads, int64_t dim, int64_t v_dim,
                                   int64_t cache_slots, int64_t split_size, bool hopper,
                                   int device) {
  TreeAttentionParams params{};
  params.dtype = item_size == 4 ? DType::f32 : DType::bf16;
  params.batch = batch;
  params.window_slots = window_slots;
  params.q_heads = q_heads;
  params.kv_heads = kv_heads;
  params.dim = dim;
  params.v_dim = v_dim;
  params.cache_slots = cache_slots;
  params.split_size = split_size;
  const TreeAttentionPlan plan = make_plan(params, hopper, device);
  return py::make_tuple(plan.floats, plan.tickets);
}

void tree_attention(const py::sequence& inputs, const py::object& out, const py::object& lse,
                    const py::object& workspace, const py::object& tickets, float scale,
                    float softcap, int64_t window, int64_t split_size, bool hopper, int device,
                    std::uintptr_t stream) {
  const AttentionTensors t = as_attention_tensors(inputs);
  const Tensor out_t = as_tensor(out), lse_t = as_tensor(lse);
  const Tensor floats = as_tensor(workspace), zeros = as_tensor(tickets);
  TreeAttentionParams params = attention_params(t, scale, softcap, window, split_size);
  expect_array("tree_attention: out", out_t, params.dtype,
               {params.batch, params.window_slots, params.q_heads, params.v_dim});
  expect_array("tree_attention: lse", lse_t, DType::f32,
               {params.batch, params.q_heads, params.window_slots});
  params.out = out_t.data;
  params.lse = lse_t.as<float>();
  const TreeAttentionPlan plan = make_plan(params, hopper, device);
  expect_array("tree_attention: workspace", floats, DType::f32, {plan.floats});
  expect_array("tree_attention: tickets", zeros, DType::i32, {plan.tickets});
  py::gil_scoped_release release;
  raise_if_cuda_error("tree_attention",
                      tree_attention_cuda(params, plan, floats.as<float>(), zeros.as<int32_t>(),
                                          cuda_launch(device, stream)));
}

}  // namespace

void bind_tree_attention_cuda(py::module_& m) {
  m.def("tree_attention_workspace", &tree_attention_workspace);
  m.def("tree_attention", &tree_attention);
}

}  // namespace specdec
