#include "rejection_sample.h"

#include "cuda.h"

namespace specdec {

void bind_rejection_sample_cuda(py::module_& m) {
  const char* op = "rejection_sample";
  m.def(
      "rejection_sample_workspace",
      [](const py::object& target_logits, const py::sequence& window, const py::sequence& sampling,
         const py::object& draft_logits, const py::object& draft_vocab_map, int rule,
         float threshold, float alpha, const py::sequence& outputs) {
        return rejection_sample_cuda_workspace(
            as_rejection_sample(target_logits, window, sampling, draft_logits, draft_vocab_map,
                                rule, threshold, alpha, outputs));
      });
  m.def("rejection_sample", [op](const py::object& target_logits, const py::sequence& window,
                                 const py::sequence& sampling, const py::object& draft_logits,
                                 const py::object& draft_vocab_map, int rule, float threshold,
                                 float alpha, const py::sequence& outputs,
                                 const py::object& workspace, int device, std::uintptr_t stream) {
    const RejectionSampleParams params =
        as_rejection_sample(target_logits, window, sampling, draft_logits, draft_vocab_map, rule,
                            threshold, alpha, outputs);
    const Tensor words = as_tensor(workspace);
    expect_array(op, words, DType::i64, {rejection_sample_cuda_workspace(params)});
    py::gil_scoped_release release;
    raise_if_cuda_error(op, rejection_sample_cuda(params, words.data, cuda_launch(device, stream)));
  });
}

}  // namespace specdec
