// What the bindings of the CUDA module share.
#pragma once

#include <string>

#include "common/cuda_launch.h"
#include "tensor.h"

namespace specdec {

// Throws RuntimeError "OP: CUDA error CODE: reason" unless `code` is 0.
inline void raise_if_cuda_error(const char* op, int code) {
  if (code == 0) return;
  throw std::runtime_error(std::string(op) + ": CUDA error " + std::to_string(code) + ": " +
                           cuda_error_text(code));
}

// Device index and stream as Python has them: `torch.cuda.current_stream().cuda_stream`.
inline CudaLaunch cuda_launch(int device, std::uintptr_t stream) {
  return {device, reinterpret_cast<void*>(stream)};
}

}  // namespace specdec
