// What the headers that CPU and CUDA kernels share are built on.
#pragma once

#if defined(__CUDACC__) || defined(SPECDEC_CUDA_EMULATED)
#include "common/device.cuh"
#else
#include "common/vec.h"
#endif
