#include "probe/probe.h"

#include "tensor.h"

namespace specdec {

// Both do a known amount of work and leave the clock to the caller.
void bind_probe(py::module_& m) {
  m.def(
      "read_bandwidth_probe",
      [](const py::object& buffer, int num_threads) {
        const Tensor t = as_tensor(buffer);
        expect_shape("read_bandwidth_probe: buffer", t, {-1});
        expect_contiguous("read_bandwidth_probe: buffer", t);
        if (num_threads < 1) throw py::value_error("read_bandwidth_probe: num_threads below 1");
        uint32_t sum = 0;
        const int64_t bytes = t.shape[0] * item_size(t.dtype);
        py::gil_scoped_release release;
        raise_unless_ok("read_bandwidth_probe",
                        read_probe_cpu(ReadProbeParams{t.data, bytes, &sum, num_threads}));
        return sum;
      },
      "Reads a contiguous 1-D tensor once; returns the sum of its 32-bit words.");
  m.def(
      "compute_probe",
      [](int arithmetic, int64_t rounds, int num_threads) {
        if (num_threads < 1) throw py::value_error("compute_probe: num_threads below 1");
        double flops = 0.0;
        py::gil_scoped_release release;
        raise_unless_ok("compute_probe", compute_probe_cpu(ComputeProbeParams{
                                             Arithmetic(arithmetic), rounds, &flops, num_threads}));
        return flops;
      },
      "Multiply-adds in registers: 0 fp32, 1 bf16 dot products, 2 bf16 tiles; returns the flops "
      "done, 0 without the instruction.");
}

}  // namespace specdec
