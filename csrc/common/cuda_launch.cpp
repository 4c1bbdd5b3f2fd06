#include "common/cuda_launch.h"

#include <cuda_runtime_api.h>

namespace specdec {

const char* cuda_error_text(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

}  // namespace specdec
