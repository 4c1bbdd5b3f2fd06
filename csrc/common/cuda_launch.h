// Where a CUDA kernel runs and what came of it, in plain types: no CUDA header is needed to call
// one.
#pragma once

namespace specdec {

struct CudaLaunch {
  int device;
  void* stream;  // a cudaStream_t
};

// The text of a cudaError_t, which is what the NAME_cuda functions return (0 is success).
const char* cuda_error_text(int code);

}  // namespace specdec
