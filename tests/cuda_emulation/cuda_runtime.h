// CUDA on the CPU, for tests: with this folder first on the include path, g++ compiles a .cu file
// unchanged and its kernels run block after block, one fiber for each CUDA thread.
//
// What it shows: wrong results and indices (together with AddressSanitizer), reads of memory that
// nobody wrote (fresh memory is NaN or -1), missing barriers (under several schedules), barriers
// and warp operations that not all threads reach, copies that nobody waited for. What it cannot
// show: the memory model (fences are no-ops), blocks that run at the same time, speed.
//
// Kernels launch through cudaLaunchKernelEx and declare shared memory by csrc/common/launch.cuh,
// as neither <<< >>> nor __shared__ can be given this meaning; both are errors here.
#pragma once

#ifndef SPECDEC_CUDA_EMULATED
#define SPECDEC_CUDA_EMULATED
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ __attribute__((always_inline)) inline
#define __launch_bounds__(...)
#define __constant__ static const
#define __restrict__ __restrict
#define __align__(bytes) alignas(bytes)
#define __grid_constant__

#include "emulation/async_copy.h"
#include "emulation/atomics.h"
#include "emulation/hopper.h"
#include "emulation/intrinsics.h"
#include "emulation/matrix.h"
#include "emulation/runtime.h"
#include "emulation/scheduler.h"
#include "emulation/types.h"
#include "emulation/warp.h"
