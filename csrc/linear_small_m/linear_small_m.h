#pragma once

#include "common/isa.h"
#include "common/params.h"
#include "common/status.h"

namespace specdec {

// y[m, n] = sum_k x[m, k] weight[n, k] + bias[n], all of one dtype, accumulated in fp32.
//
// Every output has one accumulator, a vector that walks k upwards and is then summed by a fixed
// tree or an element of a matrix tile, so a row of y does not depend on M, on the other rows or on
// the number of threads. It does depend on the instruction set. Where that has dot products of bf16
// pairs or matrix tiles, those are used for bf16, and they take subnormal inputs and sums for zero.
struct LinearSmallMParams {
  const void* x;  // [M, x_stride], unit stride over K
  int64_t x_stride;
  const void* weight;  // [N, weight_stride], unit stride over K
  int64_t weight_stride;
  const void* bias;  // [N] or nullptr
  void* y;           // [M, N]
  int64_t m;
  int64_t n;
  int64_t k;
  DType dtype;
  int num_threads;
};

}  // namespace specdec

SPECDEC_CPU_OP_BF16(linear_small_m, LinearSmallMParams)
