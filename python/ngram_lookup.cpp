#include "ngram_lookup/ngram_lookup.h"

#include "tensor.h"

namespace specdec {

void bind_ngram_lookup(py::module_&) {}

}  // namespace specdec
