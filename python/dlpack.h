// Tensors of torch 2.10 and newer through DLPack's C interface, which is quicker than Python
// methods and takes less of the cache.
#pragma once

#include "tensor.h"

namespace specdec {
namespace dlpack {

bool available();

// False when the value is not a plain torch.Tensor of a dtype that kernels take.
bool view(const py::handle& value, Tensor* tensor);

// Needs available().
NewTensor new_tensor(DType dtype, const int64_t* shape, int ndim);

}  // namespace dlpack
}  // namespace specdec
