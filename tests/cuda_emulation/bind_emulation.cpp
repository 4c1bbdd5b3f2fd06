// What the emulated module has beyond the real one.
#include <pybind11/pybind11.h>

#include "emulation/scheduler.h"

namespace specdec {

void bind_emulation(pybind11::module_& m) {
  m.attr("is_emulated") = true;
  m.def("set_schedule", &cuda_emulation::set_schedule);
}

}  // namespace specdec
