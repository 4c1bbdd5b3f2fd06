#include "linear_small_m/linear_small_m.h"

#include "tensor.h"

namespace specdec {

void bind_linear_small_m(py::module_&) {}

}  // namespace specdec
