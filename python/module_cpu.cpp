// The module specdec_kernels._cpu: one bind_OP function per op, each in python/OP.cpp.
#include <pybind11/pybind11.h>

#include "common/isa.h"

namespace specdec {

namespace py = pybind11;

void bind_build_tree(py::module_& m);
void bind_commit_kv(py::module_& m);
void bind_linear_small_m(py::module_& m);
void bind_ngram_index(py::module_& m);
void bind_ngram_lookup(py::module_& m);
void bind_probe(py::module_& m);
void bind_rejection_sample(py::module_& m);
void bind_rms_norm(py::module_& m);
void bind_sample(py::module_& m);
void bind_suffix_tree(py::module_& m);
void bind_topk_logprobs(py::module_& m);
void bind_tree_attention(py::module_& m);
void bind_verify_greedy(py::module_& m);

}  // namespace specdec

PYBIND11_MODULE(_cpu, m) {
  using namespace specdec;
  m.doc() = "CPU kernels of specdec_kernels. Call them through specdec_kernels.ops.";
  m.def("isa", [] { return isa_name(active_isa()); }, "The instruction set in use.");
  m.def("isa_request_refused", &isa_request_refused,
        "True when SPECDEC_CPU_ISA asks for what this machine or build lacks.");
  bind_build_tree(m);
  bind_commit_kv(m);
  bind_linear_small_m(m);
  bind_ngram_index(m);
  bind_ngram_lookup(m);
  bind_probe(m);
  bind_rejection_sample(m);
  bind_rms_norm(m);
  bind_sample(m);
  bind_suffix_tree(m);
  bind_topk_logprobs(m);
  bind_tree_attention(m);
  bind_verify_greedy(m);
}
