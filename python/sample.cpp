#include "sample/sample.h"

#include "tensor.h"

namespace specdec {

void bind_sample(py::module_&) {}

}  // namespace specdec
