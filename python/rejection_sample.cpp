#include "rejection_sample/rejection_sample.h"

#include "tensor.h"

namespace specdec {

void bind_rejection_sample(py::module_&) {}

}  // namespace specdec
