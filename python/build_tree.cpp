#include "build_tree/build_tree.h"

#include "tensor.h"

namespace specdec {

// candidates: root_token_ids, token_ids, scores, parents, max_nodes. outputs: as in DraftTree.
void bind_build_tree(py::module_& m) {
  m.def("build_tree", [](const py::sequence& candidates, const py::sequence& outputs,
                         int num_threads) {
    const auto in = as_tensors<5>(candidates), out = as_tensors<5>(outputs);
    const int64_t batch = in[1].shape[0], count = in[1].shape[1], width = out[0].shape[1];
    expect_array("build_tree: root_token_ids", in[0], DType::i64, {batch});
    expect_array("build_tree: token_ids", in[1], DType::i64, {batch, count});
    expect_array("build_tree: scores", in[2], DType::f32, {batch, count});
    expect_array("build_tree: parents", in[3], DType::i32, {batch, count});
    expect_array("build_tree: max_nodes", in[4], DType::i32, {batch});
    expect_array("build_tree: draft_token_ids", out[0], DType::i64, {batch, width});
    for (int i : {1, 4}) expect_array("build_tree: outputs", out[i], DType::i32, {batch, width});
    expect_array("build_tree: num_nodes", out[2], DType::i32, {batch});
    expect_array("build_tree: tree_mask", out[3], DType::i64, {batch, width, (width + 63) / 64});
    const BuildTreeParams params{in[0].as<int64_t>(),
                                 in[1].as<int64_t>(),
                                 in[2].as<float>(),
                                 in[3].as<int32_t>(),
                                 in[4].as<int32_t>(),
                                 batch,
                                 count,
                                 width,
                                 out[0].as<int64_t>(),
                                 out[1].as<int32_t>(),
                                 out[2].as<int32_t>(),
                                 out[3].as<uint64_t>(),
                                 out[4].as<int32_t>(),
                                 num_threads};
    py::gil_scoped_release release;
    raise_unless_ok("build_tree", build_tree_cpu(params));
  });
}

}  // namespace specdec
