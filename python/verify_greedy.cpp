#include "verify_greedy/verify_greedy.h"

#include "tensor.h"

namespace specdec {

void bind_verify_greedy(py::module_&) {}

}  // namespace specdec
