// The module specdec_kernels._cuda: one bind_OP_cuda function per op, each in python/OP_cuda.cpp.
#include <pybind11/pybind11.h>

namespace specdec {

namespace py = pybind11;

void bind_commit_kv_cuda(py::module_& m);
void bind_ngram_lookup_cuda(py::module_& m);
void bind_rejection_sample_cuda(py::module_& m);
void bind_sample_cuda(py::module_& m);
void bind_tree_attention_cuda(py::module_& m);
void bind_verify_greedy_cuda(py::module_& m);
#if defined(SPECDEC_CUDA_EMULATED)
void bind_emulation(py::module_& m);
#endif

}  // namespace specdec

PYBIND11_MODULE(_cuda, m) {
  using namespace specdec;
  m.doc() = "CUDA kernels of specdec_kernels. Call them through specdec_kernels.ops.";
  bind_commit_kv_cuda(m);
  bind_ngram_lookup_cuda(m);
  bind_rejection_sample_cuda(m);
  bind_sample_cuda(m);
  bind_tree_attention_cuda(m);
  bind_verify_greedy_cuda(m);
#if defined(SPECDEC_CUDA_EMULATED)
  bind_emulation(m);
#endif
}
