#include "rejection_sample.h"

namespace specdec {

void bind_rejection_sample(py::module_& m) {
  m.def("rejection_sample", [](const py::object& target_logits, const py::sequence& window,
                               const py::sequence& sampling, const py::object& draft_logits,
                               const py::object& draft_vocab_map, int rule, float threshold,
                               float alpha, const py::sequence& outputs, int num_threads) {
    RejectionSampleParams params =
        as_rejection_sample(target_logits, window, sampling, draft_logits, draft_vocab_map, rule,
                            threshold, alpha, outputs);
    params.num_threads = num_threads;
    py::gil_scoped_release release;
    raise_unless_ok("rejection_sample", rejection_sample_cpu(params));
  });
}

}  // namespace specdec
