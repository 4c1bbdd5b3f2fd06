#include "tree_attention/tree_attention.h"

#include "tensor.h"

namespace specdec {

void bind_tree_attention(py::module_&) {}

}  // namespace specdec
