#include <cuda_runtime_api.h>

#include "common/cuda_launch.h"

namespace specdec {

const char* cuda_error_text(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

}  // namespace specdec
