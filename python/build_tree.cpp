#include "build_tree/build_tree.h"

#include "tensor.h"

namespace specdec {

// candidates: root_token_ids, token_ids, scores, parents, max_nodes. outputs: as in DraftTree.
void bind_build_tree(py::module_& m) {
  m.def("build_tree",
        [](const py::sequence& candidates, const py::sequence& outputs, int num_threads) {
          Tensor in[5], out[5];
          for (int i = 0; i < 5; ++i)
            in[i] = as_tensor(candidates[i]), out[i] = as_tensor(outputs[i]);
          const int64_t batch = in[1].shape[0], count = in[1].shape[1], width = out[0].shape[1];
          for (int i : {0, 4}) expect_shape("build_tree: rows", in[i], {batch});
          for (int i : {1, 2, 3}) expect_shape("build_tree: candidates", in[i], {batch, count});
          for (int i : {0, 1, 4}) expect_shape("build_tree: outputs", out[i], {batch, width});
          expect_shape("build_tree: tree_mask", out[3], {batch, width, (width + 63) / 64});
          expect_dtype("build_tree: scores", in[2], {DType::f32});
          for (int i : {0, 1}) expect_dtype("build_tree: token_ids", in[i], {DType::i64});
          for (int i : {3, 4}) expect_dtype("build_tree: parents", in[i], {DType::i32});
          for (const Tensor& each : in) expect_contiguous("build_tree: candidates", each);
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
